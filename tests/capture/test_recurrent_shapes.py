import pytest
import torch
from torch import nn
from torch.export import Dim

from qtk.calls.inputs import is_free
from qtk.capture.recurrent_shapes import lengths_stay_free

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


def test_torch_is_as_before_after_an_error():
    def fail():
        with lengths_stay_free():
            assert before != torch.ops.aten.lstm.input.py_kernels
            raise RuntimeError("stop")

    before = dict(torch.ops.aten.lstm.input.py_kernels)
    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert before == torch.ops.aten.lstm.input.py_kernels
