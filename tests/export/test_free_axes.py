import torch
from torch import nn

import qtk
from qtk.export.free_axes import doubled, free_axes


def test_free_axes_are_those_whose_length_is_symbolic():
    prepared = qtk.prepare_model(nn.Linear(4, 3).eval(), torch.randn(2, 5, 4))
    (node,) = prepared.graph.find_nodes(op="placeholder")
    assert free_axes(node) == [0]
    assert free_axes(prepared.graph.output_node()) == []


def test_a_length_of_one_is_doubled_along_free_axes_alone():
    x = torch.arange(3.0).reshape(1, 3, 1)
    result = doubled(x, [0])
    assert result.tolist() == [x[0].tolist()] * 2
    assert doubled(x, []).data_ptr() != x.data_ptr()
    assert doubled("other", [0]) == "other"
