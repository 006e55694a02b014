"""Recurrent nets with each option, prepared once for all tests that leave them as they are, and their simulations."""

import functools

import torch
from torch import nn

import qtk

N, T, I, H, P = 3, 5, 8, 6, 4  # noqa: E741
OPTIONS = {
    "plain": {},
    "two_layers": {"num_layers": 2, "dropout": 0.5},
    "both_ways": {"bidirectional": True, "batch_first": True},
    "without_bias": {"bias": False, "num_layers": 2, "bidirectional": True},
    "projected": {"proj_size": P, "bidirectional": True},
}


class Net(nn.Module):
    """All that a net hands out, with a start state or without."""

    def __init__(self, kind, **options):
        super().__init__()
        self.rnn = kind(I, H, **options)

    def forward(self, x, *states):
        return self.rnn(x, as_taken(states))


class Cell(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.cell = kind(I, H)

    def forward(self, x, *states):
        return self.cell(x, as_taken(states))


def as_taken(states):
    """None, one tensor or a pair."""
    return states if len(states) == 2 else states[0] if states else None


@functools.cache
def case(kind, option):
    """A net in eval mode, the same prepared, and an input; shared by tests that do not change them."""
    torch.manual_seed(0)
    model = Net(kind, **OPTIONS[option]).eval()
    x = torch.randn((N, T, I) if OPTIONS[option].get("batch_first") else (T, N, I))
    return model, qtk.prepare_model(model, x), x


def simulated(prepared, inputs, bits=8, data=None, **options):
    sim = qtk.QuantSim(prepared, inputs, **{"weight_bits": bits, "activation_bits": bits} | options)
    sim.compute_encodings(data or [inputs], progress=False)
    return sim
