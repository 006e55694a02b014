"""Packed sequences in one graph, against the models' own Python, at other numbers of sequences and other lengths."""

import contextlib

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils import _pytree as pytree

import qtk
from qtk.calls.inputs import is_free
from qtk.capture.recurrent_tracing import lengths_stay_free, packing_as_ops, packing_checked
from qtk.nn.recurrent import Recurrent
from tests.zoo import packed
from tests.zoo.packed import sequences


def states_too(model, count, seed, **options):
    return *sequences(count, seed, **options), *packed.states(model.rnn, count, seed)


CASES = {
    "total length": (packed.ToTotalLength, sequences),
    "longest": (lambda: packed.ToLongest(tagger=False), sequences),
    "sorted": (packed.SortedBefore, lambda count, seed: sequences(count, seed, ordered=True)),
    "by hand": (lambda: packed.SortedByHand(tagger=False), sequences),
    "last output": (packed.LastOutput, sequences),
    "packed data": (packed.PackedData, sequences),
    "gru, time first": (lambda: packed.ToLongest(kind=nn.GRU, batch_first=False, num_layers=2),
                        lambda count, seed: sequences(count, seed, time_first=True)),
    "rnn": (lambda: packed.ToTotalLength(kind=nn.RNN, bidirectional=False), sequences),
}
STATES = {
    "states": lambda: packed.FirstStates(num_layers=2, proj_size=2),
    "states, time first": lambda: packed.FirstStates(batch_first=False),
}


@torch.no_grad()
def assert_one_exact_graph(model, inputs):
    prepared = qtk.prepare_model(model.eval(), inputs(3, 0))
    assert prepared.report.rung == "export"
    assert prepared.report.eval_difference == 0
    assert sum(isinstance(module, Recurrent) for module in prepared.modules()) >= 1
    assert all(ours is prepared.get_parameter(name) for name, ours in model.named_parameters())
    for count, seed in ((3, 1), (4, 2), (1, 3), (2, 4)):
        leaves = [pytree.tree_leaves(each(*inputs(count, seed))) for each in (model, prepared)]
        assert all(torch.equal(a, b) for a, b in zip(*leaves, strict=True))


@pytest.mark.sample(2)
@pytest.mark.medium
@pytest.mark.parametrize("name", CASES)
def test_one_graph_computes_the_bits_of_the_model_for_other_lengths(name):
    make, inputs = CASES[name]
    assert_one_exact_graph(make(), inputs)


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", STATES)
def test_the_batch_stays_free_with_states(name):
    model = STATES[name]()
    time_first = not model.rnn.batch_first
    assert_one_exact_graph(model, lambda count, seed: states_too(model, count, seed, time_first=time_first))


@pytest.mark.medium
def test_lengths_that_the_padding_does_not_hold_and_other_states_are_errors():
    model = packed.FirstStates().eval()
    prepared = qtk.prepare_model(model, states_too(model, 3, 0), verify=False)
    x, lengths, hidden, cell = states_too(model, 3, 1)
    with pytest.raises(ValueError, match="a length of 6, the padded input has 5"):
        prepared(x, lengths + 6 - lengths.max(), hidden, cell)
    with packing_checked():
        with pytest.raises(ValueError, match="a length of 6, the padded input has 5"):
            model(x, lengths + 6 - lengths.max(), hidden, cell)
        with pytest.raises(RuntimeError):
            model(x, lengths, hidden, cell[:1])
        with pytest.raises(RuntimeError):
            model(torch.cat([x, x]), lengths, hidden, cell)


def test_torch_is_as_before_after_an_error():
    def kept():
        return nn.LSTM.forward, nn.GRU.forward, pack_padded_sequence.__code__, torch._VF._pack_padded_sequence

    before = kept()
    for active in (packing_as_ops, packing_checked):
        with active():
            assert all(one is not other for one, other in zip(kept(), before, strict=True))
        with contextlib.suppress(ZeroDivisionError), active():
            raise ZeroDivisionError
        assert kept() == before


I, H = 3, 4  # noqa: E741


class Net(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        output, states = self.net(x)
        return output, *(states if isinstance(states, tuple) else (states,))


def exported(net, x, axes=(0, 1)):
    return torch.export.export(Net(net).eval(), (x,), dynamic_shapes=(dict.fromkeys(axes, Dim.AUTO),), strict=False)


NETS = {
    "lstm": lambda first: nn.LSTM(I, H, 2, batch_first=first, bidirectional=True),
    "projected": lambda first: nn.LSTM(I, H, batch_first=first, proj_size=2),
    "gru": lambda first: nn.GRU(I, H, batch_first=first),
    "rnn_tanh": lambda first: nn.RNN(I, H, batch_first=first, bidirectional=True),
    "rnn_relu": lambda first: nn.RNN(I, H, batch_first=first, nonlinearity="relu"),
}


@pytest.mark.medium
@pytest.mark.sample(3)
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("name", NETS)
def test_length_and_batch_stay_free_and_results_look_like_those_of_torch(name, batch_first):
    net, x = NETS[name](batch_first).eval(), torch.randn(5, 6, I)
    with lengths_stay_free():
        program = exported(net, x)
    (given,) = (node for node in program.graph.find_nodes(op="placeholder") if node.name == "x")
    assert [is_free(size) for size in given.meta["val"].shape] == [True, True, False]
    with lengths_stay_free():
        fixed = exported(net, x, axes=())
    outputs = [node.meta["val"] for node in fixed.graph.output_node().args[0]]
    with torch.no_grad():
        expected = Net(net)(x)
    assert [(value.shape, value.stride(), value.dtype) for value in outputs] == [
        (value.shape, value.stride(), value.dtype) for value in expected
    ]
    for shape in ((5, 6, I), (2, 9, I)):
        y = torch.randn(shape)
        with torch.no_grad():
            assert all(torch.equal(a, b) for a, b in zip(program.module()(y), Net(net)(y), strict=True))


def test_shapes_are_found_as_before_after_an_error():
    def fail():
        with lengths_stay_free():
            assert before != torch.ops.aten.lstm.input.py_kernels
            raise RuntimeError("stop")

    before = dict(torch.ops.aten.lstm.input.py_kernels)
    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert before == torch.ops.aten.lstm.input.py_kernels
