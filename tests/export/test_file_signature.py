import string

import pytest
import torch
from torch import nn

import qtk
from qtk.calls.calls import Call
from qtk.export.file_signature import (
    LONGEST,
    EqualAxes,
    doubled,
    equal_axes,
    file_inputs,
    file_outputs,
    file_signature,
    file_stem,
    free_axes,
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("h", torch.ones(2, 3))
        self.inner = nn.Module()
        self.inner.register_buffer("last", torch.zeros(2, 3))

    def forward(self, x, h_out):
        self.h.copy_(self.h + x)
        self.inner.last.copy_(x)
        return {"h": self.h * h_out}


def test_buffers_are_the_last_and_names_that_are_taken_get_a_suffix():
    model = qtk.prepare_model(Net(), (torch.zeros(2, 3), torch.zeros(2, 3)))
    signature = file_signature(model)
    assert [*signature.inputs] == ["x", "h_out", "h", "inner.last"]
    assert [*signature.outputs] == ["h_1", "h_out_1", "inner.last_out"]
    assert signature.buffers == {"h": ("h", "h_out_1"), "inner.last": ("inner.last", "inner.last_out")}


def test_the_values_of_a_call_begin_with_those_of_its_buffers_or_the_present_ones():
    model, x = qtk.prepare_model(Net(), (torch.zeros(2, 3), torch.zeros(2, 3))), torch.full((2, 3), 2.0)
    inputs = file_inputs(model, Call((x, x), {}, None, buffers={"h": 5 * x}))
    assert {name: float(value[0, 0]) for name, value in inputs.items()} == {
        "x": 2, "h_out": 2, "h": 10, "inner.last": 0}
    assert [float(value[0, 0]) for value in file_outputs(model, model(x, x))] == [6, 3, 2]


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


PATHS = [
    "/x/evil", "..", ".", ".hidden", "...", "conv/1", "conv%2F1", "conv_1", "a\\b", "a:b", "C:\\x", "nul\0",
    "line\nbreak", "a b", "ä", "模型", "\ud800", "model", "a" * 300, "a" * 299 + "b", "a" * LONGEST,
    "a" * (LONGEST + 1), "/" * 300, "模" * 300, file_stem("a" * 300), "backbone.body", "body@1",
]


@pytest.mark.medium
def test_different_paths_have_different_stems():
    assert len({file_stem(path) for path in PATHS}) == len(PATHS)


@pytest.mark.parametrize("path", PATHS, ids=ascii)
def test_a_stem_is_one_visible_component_and_not_too_long(path, tmp_path):
    stem = file_stem(path)
    assert set(stem) <= set(string.ascii_letters + string.digits + "_.-~%+@")
    assert not stem.startswith(".")
    assert len(stem) <= LONGEST
    (tmp_path / f"{stem}.onnx.data").touch()
    assert [each.name for each in tmp_path.iterdir()] == [f"{stem}.onnx.data"]


def test_a_module_path_in_letters_is_its_own_stem():
    assert file_stem("backbone.stages.0.conv_1") == "backbone.stages.0.conv_1"
