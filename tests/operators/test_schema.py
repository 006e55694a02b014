import torch
from torch import fx

from qtk.operators.schema import named_arguments, schema_arguments


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
