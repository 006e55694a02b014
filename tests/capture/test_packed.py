"""The graph built for a packed sequence against torch's own net."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from qtk.calls.calls import Call
from qtk.capture.packed import build_packed
from qtk.capture.recurrent_tracing import takes_packed
from qtk.graph.sites import OWNER, label

NETS = {
    "lstm": lambda: nn.LSTM(3, 5, num_layers=2, bidirectional=True),
    "projected": lambda: nn.LSTM(3, 5, proj_size=2, batch_first=True),
    "gru": lambda: nn.GRU(3, 5),
}


def packed(lengths, seed=0):
    x = torch.randn(max(lengths), len(lengths), 3, generator=torch.Generator().manual_seed(seed))
    return pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=False)


def flat(result):
    output, last = result
    return [*pad_packed_sequence(output), *(last if isinstance(last, tuple) else (last,))]


@torch.no_grad()
@pytest.mark.parametrize("given_states", [False, True])
@pytest.mark.parametrize("name", NETS)
def test_the_graph_is_the_net_for_other_lengths_in_any_order(name, given_states):
    torch.manual_seed(0)
    net = NETS[name]().eval()
    graph = build_packed(net, Call((packed([2, 4, 1]),), {}, None), "encoder")
    other, states = packed([3, 1, 5, 2], seed=1), ()
    if given_states:
        shapes = [state.shape for state in flat(net(other))[2:]]
        torch.manual_seed(1)
        states = tuple(torch.randn(shape) for shape in shapes)
        states = (states if len(states) > 1 else states[0],)
    expected, found = flat(net(other, *states)), flat(graph(other, *states))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert {label(node, OWNER) for node in graph.graph.nodes if node.op == "call_module"} == {"encoder"}


def test_only_a_recurrent_net_with_a_packed_sequence_takes_this_way():
    sequence = packed([2, 1])
    assert takes_packed(nn.GRU(3, 5), Call((sequence,), {}, None))
    assert takes_packed(nn.GRU(3, 5), Call((), {"input": sequence}, None))
    assert not takes_packed(nn.GRU(3, 5), Call((torch.randn(2, 1, 3),), {}, None))
    assert not takes_packed(nn.Identity(), Call((sequence,), {}, None))
