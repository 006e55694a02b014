"""Weights that are left in float, in ONNX Runtime's optimized graph: multiplied as they are."""

import numpy as np
import pytest
import torch
from torch import nn

from tests.export.onnx.onnxruntime.test_flat_linears import exported, optimized_kinds, steps
from tests.exported_files import leave_out

INTEGER = ("QGemm", "QLinearConv", "QLinearMatMul", "MatMulInteger", "MatMulIntegerToFloat", "ConvInteger")


class Matrix(nn.Module):
    """A parameter on either side of a product."""

    def __init__(self, *, left):
        super().__init__()
        self.left, self.weight = left, nn.Parameter(torch.randn(16, 16))

    def forward(self, x):
        return self.weight @ x if self.left else x @ self.weight


MODELS = {
    "linear": (lambda: nn.Linear(16, 8), (4, 16)),
    "linear_relu": (lambda: nn.Sequential(nn.Linear(16, 8), nn.ReLU()), (4, 3, 16)),
    "conv": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), (2, 3, 9, 9)),
    "conv_transpose": (lambda: nn.ConvTranspose2d(3, 8, 3), (2, 3, 9, 9)),
    "matmul": (lambda: Matrix(left=False), (4, 16)),
    "matmul_left": (lambda: Matrix(left=True), (2, 16, 8)),
}
FLOAT_WEIGHTS = {"version": 1, "extends": "onnxruntime", "defaults": {"weight": "float"}}


@pytest.mark.medium
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", MODELS)
def test_float_weights_are_multiplied_as_they_are(name, tmp_path):
    make, shape = MODELS[name]
    torch.manual_seed(0)
    x, folder = torch.randn(*shape), tmp_path / "out"
    sim = exported(make(), x, folder, config=FLOAT_WEIGHTS)
    assert not any(quantizer.static for quantizer in sim.quantizers.values())
    kinds = optimized_kinds(folder)
    assert not any(kinds[kind] for kind in INTEGER)
    difference = steps(sim, x, folder, optimized=True)
    assert difference.max() < 1.01
    assert (difference > 0.01).mean() < 0.005


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("name", ["linear", "conv"])
def test_without_it_onnx_runtime_rounds_them(name, tmp_path, monkeypatch):
    leave_out(monkeypatch, "keep_float_weights")
    make, shape = MODELS[name]
    torch.manual_seed(0)
    x, folder = torch.randn(*shape), tmp_path / "out"
    sim = exported(make(), x, folder, config=FLOAT_WEIGHTS)
    assert any(optimized_kinds(folder)[kind] for kind in INTEGER)
    assert (np.abs(steps(sim, x, folder, optimized=True)) > 0.01).mean() > 0.02


@pytest.mark.medium
def test_quantized_weights_are_read_as_before(tmp_path):
    x, folder = torch.randn(4, 16), tmp_path / "out"
    exported(nn.Linear(16, 8), x, folder)
    kinds = optimized_kinds(folder)
    assert (kinds["QGemm"], kinds["Max"]) == (1, 0)
