import pytest
import torch
from torch import fx, nn

from qtk.operators.targets import (
    MODULE_STACK,
    attribute,
    called_module,
    module_calls,
    named_arguments,
    schema_arguments,
)


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


def test_arguments_are_named_as_in_the_schema_defaults_included():
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    node = graph.call_function(torch.ops.aten.conv2d.default, (x, weight, None, [2, 2]), {"groups": 4})
    assert schema_arguments(node) == {
        "input": x, "weight": weight, "bias": None, "stride": [2, 2], "padding": [0, 0], "dilation": [1, 1],
        "groups": 4,
    }


def test_values_may_stand_in_for_the_arguments_of_the_call():
    graph = fx.Graph()
    node = graph.call_function(torch.ops.aten.add.Tensor, (graph.placeholder("x"), 1.0))
    assert named_arguments(node, (2.0, 3.0), {"alpha": 4}) == {"self": 2.0, "other": 3.0, "alpha": 4}


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))

    def forward(self, x):
        return self.block(self.block(x)) + 1


@pytest.mark.medium
@pytest.mark.parametrize("strict", [False, True])
def test_modules_that_are_called_twice(strict):
    graph = torch.export.export(Twice(), (torch.zeros(2, 4),), strict=strict).graph
    around = [module_calls(node) for node in graph.nodes if node.op == "call_function"]
    once = [["", "block", "block.0"], ["", "block", "block.1", "block.1.0"], ["", "block", "block.1", "block.1.1"]]
    assert [[call.path for call in calls] for calls in around] == [*once, *once, [""]]
    assert [calls[-1].is_first for calls in around] == [True] * 3 + [False] * 3 + [True]
    blocks = [calls[1].key for calls in around[:6]]
    assert len(set(blocks[:3])) == len(set(blocks[3:])) == 1
    assert len(set(blocks)) == 2


def test_marks_in_paths_and_frames_of_functions():
    node = torch.fx.Graph().placeholder("x")
    assert module_calls(node) == []
    node.meta[MODULE_STACK] = {"a": ("", nn.Module), "_empty_nn_module_stack_from_metadata_hook": ("", ""),
                               "b": ("block@1.layer@2", nn.Linear)}
    outer, inner = module_calls(node)
    assert (outer.path, outer.key, outer.is_first) == ("", "a", True)
    assert (inner.path, inner.key, inner.is_first) == ("block.layer", "b", False)
