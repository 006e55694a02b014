import string

import pytest
import torch
from torch import nn

import qtk
from qtk.calls.calls import Call
from qtk.export.file_signature import LONGEST, file_inputs, file_outputs, file_signature, file_stem


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
