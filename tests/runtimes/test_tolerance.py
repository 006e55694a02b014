"""How far a right file may be from a simulation."""

import pytest
import torch
from torch import nn

import qtk
from qtk.calls.calls import Call
from qtk.export.file_signature import tensor_outputs
from qtk.runtimes.tolerance import MARGIN_DB, tolerances_db


class Amplifier(nn.Module):
    """A quantized value on the edge of two codes, amplified: float rounding decides it."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return (self.linear(x) * self.factor).sin()


def of(model, x, **settings):
    torch.manual_seed(0)
    sim = qtk.QuantSim(model.eval(), x, **settings)
    sim.compute_encodings([x], progress=False)
    call = Call((x,), {}, None)
    return sim.model, call, tensor_outputs(sim.model, call)


@pytest.mark.medium
def test_the_quantization_error_bounds_it():
    x = torch.randn(256, 16)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
    found = {bits: tolerances_db(*of(model, x, weight_bits=bits, activation_bits=bits))[0] for bits in (4, 8)}
    _, _, expected = of(model, x, weight_bits=4, activation_bits=4)
    with torch.no_grad():
        noise = (model(x) - expected[0]).square().sum()
    assert found[4] == pytest.approx(float(10 * torch.log10(model(x).square().sum() / noise)) + MARGIN_DB, abs=0.1)
    assert found[4] < found[8]


@pytest.mark.medium
def test_noise_that_a_model_amplifies_lowers_it():
    x = torch.randn(64, 4)
    calm, wild = (tolerances_db(*of(Amplifier(factor), x, weight_bits=8, activation_bits=16))[0]
                  for factor in (1.0, 1e5))
    assert wild < 30 < calm


def test_what_a_call_writes_is_undone():
    norm = qtk.prepare_model(nn.BatchNorm1d(4).eval(), torch.ones(2, 4))
    norm.train()
    (first,), (second,) = (tensor_outputs(norm, Call((torch.ones(2, 4),), {}, None)) for _ in range(2))
    assert torch.equal(first, second)
    assert norm.training
    assert norm.get_buffer("num_batches_tracked") == 0


def test_a_call_begins_with_its_buffers_and_its_outputs_end_with_those_after_it():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("total", torch.zeros(3))

        def forward(self, x):
            self.total += x
            return self.total * 2

    model, x = qtk.prepare_model(Sum(), torch.ones(3)), torch.ones(3)
    outputs = tensor_outputs(model, Call((x,), {}, None, buffers={"total": 4 * x}))
    assert [float(value[0]) for value in outputs] == [10, 5]
    assert float(model.total.sum()) == 0
