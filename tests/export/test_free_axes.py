import pytest
import torch
from torch import fx, nn

import qtk
from qtk.calls.served_sizes import SIZES, ServedSizes
from qtk.export.free_axes import EqualAxes, doubled, equal_axes, free_axes, warn_of_written_values


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


class Masked(nn.Module):
    """Takes the mask of each row by its number, as attention does: torch ties neither batches nor, by it, names."""

    def forward(self, x, mask):
        rows = torch.arange(x.shape[0])[:, None].expand(-1, x.shape[1])
        columns = torch.arange(x.shape[1])[None, :].expand(x.shape[0], -1)
        return x * mask[rows, columns]


def test_axes_that_must_be_equal_are_one_length():
    prepared = qtk.prepare_model(Masked(), (torch.randn(3, 5), torch.ones(3, 5)), dynamic_shapes="all")
    assert equal_axes(prepared) == (
        EqualAxes(frozenset({("x", 0), ("mask", 0)})), EqualAxes(frozenset({("x", 1), ("mask", 1)})))


def test_axes_that_may_differ_are_not():
    class Both(nn.Module):
        def forward(self, x, y):
            return x.sum(0), y.sum(0)

    prepared = qtk.prepare_model(Both(), (torch.randn(3, 5), torch.ones(3, 5)))
    assert equal_axes(prepared) == (EqualAxes(frozenset({("x", 0)})), EqualAxes(frozenset({("y", 0)})))


def test_axes_of_one_name_are_one_length_and_have_it():
    class Both(nn.Module):
        def forward(self, x, y):
            return x.sum(0), y.sum(0)

    shapes = {"y": {1: "width", 0: "batch"}, "x": {0: "batch"}}
    prepared = qtk.prepare_model(Both(), (torch.randn(3, 5), torch.ones(3, 5)), dynamic_shapes=shapes)
    assert equal_axes(prepared) == (
        EqualAxes(frozenset({("x", 0), ("y", 0)}), "batch"), EqualAxes(frozenset({("y", 1)}), "width"))


def test_a_file_that_holds_the_values_of_an_input_is_warned_of(recwarn):
    model = fx.symbolic_trace(nn.ReLU())
    warn_of_written_values(model)
    assert not recwarn
    model.meta[SIZES] = ServedSizes(values={"grid": [[2, 3]]})
    with pytest.warns(UserWarning, match="values of grid, which are written .*; the file computes the same"):
        warn_of_written_values(model)
