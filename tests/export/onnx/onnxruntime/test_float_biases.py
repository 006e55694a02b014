"""Float biases of products that have no integer kernel, in ONNX Runtime's optimized graph: added as they are."""

import pytest
import torch
from torch import nn

from tests.export.onnx.onnxruntime.test_flat_linears import exported, optimized_kinds, steps
from tests.exported_files import leave_out

MODELS = {
    "linear": (lambda: nn.Linear(16, 8), (64, 16)),
    "conv": (lambda: nn.Conv2d(3, 8, 3), (4, 3, 9, 9)),
    "conv_relu": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), (4, 3, 9, 9)),
    "conv_transpose": (lambda: nn.ConvTranspose2d(3, 8, 3), (4, 3, 9, 9)),
}


def differing(name, folder, **widths):
    """The share of the outputs that are another code."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    x = torch.randn(*shape)
    sim = exported(make(), x, folder, config="default", **widths)
    return float((steps(sim, x, folder, optimized=True) > 0.5).mean())


@pytest.mark.sample(2)
@pytest.mark.medium
@pytest.mark.parametrize("name", MODELS)
def test_float_biases_are_added_as_they_are(name, tmp_path):
    assert differing(name, tmp_path / "out", weight_bits=4, activation_bits=4) < 0.001


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("name", ["conv", "linear"])
def test_without_it_onnx_runtime_rounds_them(name, tmp_path, monkeypatch):
    leave_out(monkeypatch, "keep_float_biases")
    assert differing(name, tmp_path / "out", weight_bits=4, activation_bits=4) > 0.005


@pytest.mark.medium
def test_biases_of_integer_products_are_read_as_before(tmp_path):
    x, folder = torch.randn(4, 16), tmp_path / "out"
    exported(nn.Linear(16, 8), x, folder, config="default")
    kinds = optimized_kinds(folder)
    assert (kinds["QGemm"], kinds["Max"]) == (1, 0)
