"""Products behind operators that move codes run in integers, with the values of the simulation."""

import onnx
import pytest
import torch
from torch import nn

from tests.export.onnx.onnxruntime.test_flat_linears import exported, optimized_kinds, steps
from tests.exported_files import leave_out


class Products(nn.Module):
    """Queries and keys that are parts of one tensor, multiplied."""

    def __init__(self, part):
        super().__init__()
        self.fc, self.part = nn.Linear(8, 16), part

    def forward(self, x):
        q, k = self.part(self.fc(x))
        return q @ k.transpose(-1, -2)


class Moved(nn.Module):
    def __init__(self, move):
        super().__init__()
        self.norm, self.move, self.fc = nn.LayerNorm(8), move, nn.Linear(8, 4)

    def forward(self, x):
        return self.fc(self.move(self.norm(x)))


MODELS = {
    "Gather": Products(lambda y: y.unflatten(-1, (2, 8)).movedim(-2, 0).select(0, 0)[None].unbind(0) * 2),
    "Split": Products(lambda y: y.chunk(2, -1)),
    "Pad": Moved(lambda y: nn.functional.pad(y, (0, 0, 1, 2))),
    "Concat": Moved(lambda y: torch.roll(y, 1, 1)),
    "Expand": Moved(lambda y: y[:, :1].expand(-1, 3, -1)),
    "class token": Moved(lambda y: y[:, 0]),
    "Where": Moved(lambda y: y.masked_fill(torch.arange(5)[:, None] == 2, 0.0)),
    "Resize": Moved(lambda y: nn.functional.interpolate(y.mT, scale_factor=2).mT),
    "GatherND": Moved(lambda y: y[:, torch.tensor([1, 0, 4])]),
    "ReduceMax": Moved(lambda y: y.amax(1)),
    "MaxPool": Moved(lambda y: nn.functional.max_pool2d(y, (2, 1))[:, 0]),
}


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("name", list(MODELS))
def test_the_product_behind_runs_in_integers(name, tmp_path):
    x, folder = torch.randn(2, 5, 8), tmp_path / "out"
    sim = exported(MODELS[name], x, folder)
    kinds = optimized_kinds(folder)
    assert not kinds.keys() & {"Gemm", "FusedGemm", "MatMul", "FusedMatMul", "MatMulNBits"}
    for optimized in (False, True):
        assert steps(sim, x, folder, optimized=optimized).max() < 1.01


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["Split", "Pad", "class token", "MaxPool"])
def test_without_it_the_product_is_float(name, tmp_path, monkeypatch):
    leave_out(monkeypatch, "move_codes")
    exported(MODELS[name], torch.randn(2, 5, 8), tmp_path / "out")
    kinds = optimized_kinds(tmp_path / "out")
    assert kinds.keys() & {"Gemm", "FusedGemm", "MatMul", "FusedMatMul", "MatMulNBits"}


@pytest.mark.slow
def test_behind_a_resize_it_is_float_without_the_other(tmp_path, monkeypatch):
    leave_out(monkeypatch, "move_resized_codes")
    exported(MODELS["Resize"], torch.randn(2, 5, 8), tmp_path / "out")
    assert optimized_kinds(tmp_path / "out").keys() & {"Gemm", "FusedGemm", "MatMul", "FusedMatMul", "MatMulNBits"}


@pytest.mark.medium
def test_padding_with_another_number_is_computed_in_float(tmp_path):
    x, folder = torch.randn(2, 5, 8), tmp_path / "out"
    sim = exported(Moved(lambda y: nn.functional.pad(y, (0, 0, 1, 2), value=0.3)), x, folder)
    assert steps(sim, x, folder, optimized=False).max() < 1.01


@pytest.mark.medium
def test_codes_that_no_maximum_is_defined_for_are_not_moved(tmp_path):
    x, folder = torch.randn(2, 5, 8), tmp_path / "out"
    config = {"version": 1, "extends": "default", "rules": [{"match": {"op": "layer_norm"}, "output": {"bits": 16}}]}
    sim = exported(MODELS["MaxPool"], x, folder, config=config)
    assert steps(sim, x, folder, optimized=False).max() < 1.01


@pytest.mark.medium
def test_a_moved_output_keeps_its_name_and_its_other_readers(tmp_path):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x):
            y = self.fc(x)
            first, second = y.chunk(2, -1)
            return {"first": first, "sum": y + 1, "second": second @ first.transpose(-1, -2)}

    x, folder = torch.randn(2, 5, 8), tmp_path / "out"
    exported(Two(), x, folder)
    graph = onnx.load(folder / "model.onnx").graph
    assert [value.name for value in graph.output] == ["first", "sum", "second"]
    assert [value.type.tensor_type.elem_type for value in graph.output] == [onnx.TensorProto.FLOAT] * 3


@pytest.mark.medium
def test_float8_is_moved_in_float(tmp_path):
    """ONNX has Concat and, before opset 21, Transpose of no float8: the file would be invalid."""
    x, folder = torch.randn(2, 5, 8), tmp_path / "out"
    model = Moved(lambda y: torch.roll(y.transpose(1, 2), 1, 1).transpose(1, 2))
    config = {"version": 1, "rules": [{"match": {"op": "layer_norm"}, "output": {"dtype": "fp8_e4m3"}}]}
    sim = exported(model, x, folder, config=config)
    assert steps(sim, x, folder, optimized=False).max() < 1.01
