import torch
from torch import fx

from qtk.graph.schema import schema_arguments


def test_arguments_have_their_names_however_they_are_given():
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    node = graph.call_function(torch.ops.aten.conv2d.default, (x, w), {"stride": [2, 2]})
    assert schema_arguments(node) == {
        "input": x, "weight": w, "bias": None, "stride": [2, 2], "padding": [0, 0], "dilation": [1, 1], "groups": 1,
    }
