import pytest
import torch
from torch import fx, nn

from qtk.operators.targets import attribute, called_module


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2))
        self.table = torch.arange(3)

    def forward(self, x):
        return self.inner(x)


def test_an_attribute_is_found_at_any_depth():
    net = Net()
    assert attribute(net, "table") is net.table
    assert attribute(net, "inner.0.weight") is net.inner[0].weight
    with pytest.raises(AttributeError):
        attribute(net, "inner.1.weight")


def test_only_a_call_of_a_module_has_a_called_module():
    net = Net()
    graph = fx.Graph()
    x = graph.placeholder("x")
    call = graph.call_module("inner.0", (x,))
    assert called_module(call) is None  # nobody owns the graph yet
    graph.output(call)
    owner = fx.GraphModule(net, graph)
    assert called_module(call) is owner.get_submodule("inner.0")
    assert called_module(x) is None
