"""Adaptive pools against torch: written out, and in files of fixed and of free sizes."""

import itertools

import pytest
import torch
from torch import nn

import qtk
from qtk.errors import ExportError
from qtk.export.onnx.adaptive_pools import adaptive_avg_pool, adaptive_max_pool
from tests.export.onnx.onnxruntime.test_flat_linears import exported, steps
from tests.export.onnx.simulated import run_onnx

ATEN = torch.ops.aten


@pytest.mark.parametrize("sizes", [(1, 4), (5, 7), (12, 9), (2, 3, 10)])
def test_what_torch_computes(sizes):
    torch.manual_seed(0)
    dimensions = len(sizes)
    mean, maximum = (getattr(ATEN, f"{name}{dimensions}d").default for name in (
        "_adaptive_avg_pool", "adaptive_max_pool"))
    for counts in itertools.product((1, 2, 3, 5, 8), (1, 3, 7), (4, 5, 10)[:dimensions - 1]):
        output_size = counts[:dimensions]
        for x in (torch.randn(2, 3, *sizes), torch.randint(3, (3, *sizes)).float()):  # without batch, with equal values
            torch.testing.assert_close(adaptive_avg_pool(x, output_size), mean(x, output_size))
            for found, expected in zip(adaptive_max_pool(x, output_size), maximum(x, output_size), strict=True):
                assert torch.equal(found, expected)


class Several(nn.Module):
    def __init__(self, dimensions, output_sizes):
        super().__init__()
        self.mean, self.maximum = (
            nn.ModuleList(getattr(nn, f"{name}{dimensions}d")(each, **options) for each in output_sizes)
            for name, options in (("AdaptiveAvgPool", {}), ("AdaptiveMaxPool", {"return_indices": True})))

    def forward(self, x):
        return [pool(x) for pool in self.mean], [each for pool in self.maximum for each in pool(x)]


SEVERAL = {
    "1d": ((16,), [5, 4, 1, 30]), "2d": ((16, 12), [(3, 4), (5, 5), (4, 4), (None, 7), (1, 5), 1]),
    "3d": ((4, 6, 10), [(1, 2, 2), (1, 3, 3), (None, 1, 1), (3, None, 7), 1]),
}


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("free", [False, True], ids=["fixed", "free"])
@pytest.mark.parametrize("name", SEVERAL)
def test_files_compute_what_torch_does(name, free, tmp_path):
    torch.manual_seed(0)
    sizes, output_sizes = SEVERAL[name]
    fixes_axes = [each for each in output_sizes if isinstance(each, tuple) and None in each]  # by torch's capture
    model = Several(len(sizes), [each for each in output_sizes if not (free and each in fixes_axes)]).eval()
    x, other = torch.randn(2, 3, *sizes), torch.randn(3, 3, *(2 * size - 1 if free else size for size in sizes))
    prepared = qtk.prepare_model(model, x, dynamic_shapes="all" if free else "batch")
    sim = qtk.QuantSim(prepared, x, weight_bits=None, activation_bits=None)
    sim.export(tmp_path / "out", formats=("onnx",), progress=False)
    for given in (x, other):
        means, maxima = model(given)
        found = run_onnx(tmp_path / "out" / "model.onnx", given)
        for each, expected in zip(found, [*means, *maxima], strict=True):
            torch.testing.assert_close(torch.from_numpy(each), expected)


class OfHalf(nn.Module):
    def forward(self, x):
        return nn.functional.adaptive_avg_pool2d(x, (x.shape[-2] // 2 - 1, 1))


@pytest.mark.medium
def test_a_free_number_of_windows_is_refused(tmp_path):
    x = torch.randn(2, 3, 12, 14)
    sim = qtk.QuantSim(OfHalf(), x, dynamic_shapes="all", weight_bits=None, activation_bits=None)
    with pytest.raises(ExportError, match=r"an adaptive pool makes .* along axis -2.*give the pool a number"):
        sim.export(tmp_path / "out", formats=("onnx",), progress=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("pool", [nn.AdaptiveMaxPool2d((3, 5)), nn.AdaptiveAvgPool2d((3, 5))], ids=["max", "mean"])
def test_quantized_images_of_any_size(pool, tmp_path):
    x = torch.randn(2, 3, 12, 13)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), pool, nn.Conv2d(4, 5, 1))
    sim = exported(model, x, tmp_path / "out", dynamic_shapes="all")
    for given in (x, torch.randn(1, 3, 20, 9)):
        for optimized in (False, True):
            assert steps(sim, given, tmp_path / "out", optimized=optimized).max() < 1.01
