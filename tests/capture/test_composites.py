"""Ops that hide a layer become the module that computes the same, called with the op's own arguments."""

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.utils.rnn import pack_padded_sequence

from qtk.capture.composites import CompositeCall, composite_called, composite_of, sequence_composite
from qtk.nn.attention import Attention
from qtk.nn.recurrent import Recurrent, RecurrentCell

T, N, I, H, P = 4, 3, 5, 6, 2  # noqa: E741
ATEN = torch.ops.aten

pytestmark = pytest.mark.filterwarnings("ignore:The tensor attributes self._flat_weights")


class Function(nn.Module):
    """Inputs to whatever the test wants."""

    def __init__(self, code):
        super().__init__()
        self.code = code

    def forward(self, *inputs):
        return self.code(*inputs)


def op_node(model, *inputs):
    """The op of an exported model that has a composite, and the values of everything it reads."""
    program = torch.export.export(model.eval(), inputs, strict=False)
    module = program.module()
    nodes = [node for node in module.graph.nodes if composite_of(node, model) is not None]
    assert len(nodes) == 1
    return nodes[0], module


def called(model, *inputs):
    """The composite of the one hidden layer of ``model``, and what it makes of the arguments the op has there."""
    node, module = op_node(model, *inputs)
    call = composite_of(node, model)
    recorded = {}

    class Recorder(fx.Interpreter):
        def run_node(self, n):
            recorded[n] = super().run_node(n)
            return recorded[n]

    with torch.no_grad():
        Recorder(module, garbage_collect_values=False).run(*inputs)
        result = call.module.eval()(*fx.node.map_arg(call.arguments, recorded.__getitem__))
    return call, result, recorded[node]


def assert_same(call: CompositeCall, result, expected):
    if call.single or isinstance(expected, torch.Tensor):
        result, expected = (result[0] if call.single else result,), (expected,)
    assert len(result) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))


NETS = {
    "lstm": lambda: nn.LSTM(I, H),
    "lstm_of_all_kinds": lambda: nn.LSTM(I, H, 2, batch_first=True, bidirectional=True, proj_size=P, dropout=0.25),
    "projected_without_biases": lambda: nn.LSTM(I, H, 2, bias=False, proj_size=P),
    "gru": lambda: nn.GRU(I, H, 3, bias=False, bidirectional=True),
    "rnn_tanh": lambda: nn.RNN(I, H, batch_first=True),
    "rnn_relu": lambda: nn.RNN(I, H, 2, nonlinearity="relu"),
}


@pytest.mark.sample(2)
@pytest.mark.medium
@pytest.mark.parametrize("name", NETS)
def test_a_recurrent_net_becomes_its_composite(name):
    torch.manual_seed(0)
    net = NETS[name]().eval()
    call, result, expected = called(net, torch.randn(T, N, I))
    assert call.name == "recurrence"
    assert isinstance(call.module, Recurrent)
    assert not call.single
    assert_same(call, result, expected)
    twin, *_ = sequence_composite(net)
    assert repr(call.module) == repr(twin)  # the same net, read from the op and from the module


@pytest.mark.parametrize("name", NETS)
def test_a_packed_sequence_is_recognized_and_kept_packed(name):
    torch.manual_seed(0)
    net = NETS[name]().eval()
    packed = pack_padded_sequence(torch.randn(T, N, I), torch.tensor([4, 2, 1]))
    twin, weights, biases = sequence_composite(net)
    parameters = [net.get_parameter(name) for names in net._all_weights for name in names]
    op = {"LSTM": ATEN.lstm.data, "GRU": ATEN.gru.data, "RNN_TANH": ATEN.rnn_tanh.data, "RNN_RELU": ATEN.rnn_relu.data}
    steps = net.num_layers * (2 if net.bidirectional else 1)
    states = [torch.zeros(steps, N, net.proj_size or H)] + [torch.zeros(steps, N, H)] * (net.mode == "LSTM")
    graph = fx.Graph()
    data, sizes, *rest = (graph.placeholder(f"p{index}") for index in range(2 + len(states) + len(parameters)))
    starts, given = rest[: len(states)], rest[len(states) :]
    node = graph.call_function(op[net.mode], (
        data, sizes, starts if net.mode == "LSTM" else starts[0], given, net.bias, net.num_layers, net.dropout, False,
        net.bidirectional,
    ))
    call = composite_of(node, nn.Module())
    values = dict(zip((data, sizes, *rest), (packed.data, packed.batch_sizes, *states, *parameters), strict=True))
    found = call.module.eval()(*fx.node.map_arg(call.arguments, values.__getitem__))
    expected = net(packed)
    last = expected[1] if isinstance(expected[1], tuple) else (expected[1],)
    assert all(torch.equal(a, b) for a, b in zip((expected[0].data, *last), found, strict=True))
    own = [[net.get_parameter(name) for name in names] for names in (weights, biases)]
    again = twin.eval()(packed.data, states, *own, packed.batch_sizes)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("make", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_a_cell_becomes_its_composite(make, bias):
    torch.manual_seed(0)
    cell = make(I, H, bias=bias)
    call, result, expected = called(cell, torch.randn(N, I))
    assert isinstance(call.module, RecurrentCell)
    assert call.module.has_biases == bias
    assert call.single == (make is not nn.LSTMCell)  # the op returns a tensor, the composite a tuple
    assert_same(call, result, expected)


@pytest.mark.parametrize(("options", "masked"), [
    ({}, False), ({}, True), ({"is_causal": True}, False), ({"scale": 0.3, "dropout_p": 0.25}, True),
])
def test_scaled_dot_product_attention_becomes_its_composite(options, masked):
    torch.manual_seed(0)
    inputs = [torch.randn(N, 2, T, 8) for _ in range(3)]
    inputs += [torch.rand(T, T) < 0.8] if masked else []
    call, result, expected = called(Function(lambda *x: F.scaled_dot_product_attention(*x, **options)), *inputs)
    assert call.name == "attention"
    assert isinstance(call.module, Attention)
    assert (call.module.scale, call.module.p) == (options.get("scale"), options.get("dropout_p", 0.0))
    assert len(call.arguments) == len(inputs)
    if call.module.p:  # in eval mode the composite drops nothing, the function still does
        expected = F.scaled_dot_product_attention(*inputs, **options | {"dropout_p": 0.0})
    assert torch.equal(result, expected)


def test_attention_keeps_the_dropout_that_its_owner_has_in_train_mode():
    graph = fx.Graph()
    inputs = [graph.placeholder(name) for name in ("q", "k", "v")]
    node = graph.call_function(ATEN.scaled_dot_product_attention.default, tuple(inputs))
    assert composite_of(node, nn.MultiheadAttention(8, 2, dropout=0.3)).module.p == 0.3  # captured in eval mode: 0
    assert composite_of(node, nn.Linear(2, 2)).module.p == 0.0


def test_other_ops_have_no_composite():
    graph = fx.Graph()
    x = graph.placeholder("x")
    nodes = [x, graph.call_function(ATEN.relu.default, (x,)), graph.call_function(torch.relu, (x,)), graph.output(x)]
    assert [composite_of(node, nn.Module()) for node in nodes] == [None] * 4


def test_only_the_call_of_a_composite_calls_one():
    root = nn.Module()
    root.add_module("attention", Attention())
    root.add_module("linear", nn.Linear(2, 2))
    graph = fx.Graph(root)
    x = graph.placeholder("x")
    linear, attention = graph.call_module("linear", (x,)), graph.call_module("attention", (x, x, x))
    assert composite_called(attention) is root.attention
    assert composite_called(linear) is None
    assert composite_called(x) is None
