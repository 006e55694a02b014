"""Pooling, sums and concatenation of quantized images in ONNX Runtime's optimized graph."""

import onnx_ir as ir
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from qtk.export.onnx.names import ValueNames
from qtk.export.onnx.onnxruntime.pooled_codes import pool_codes
from tests.export.onnx.onnxruntime.test_flat_linears import exported, optimized_kinds, steps
from tests.exported_files import leave_out


class Pooled(nn.Module):
    def __init__(self, pool):
        super().__init__()
        self.conv, self.pool, self.fc = nn.Conv2d(3, 8, 3), pool, nn.Linear(8, 5)

    def forward(self, x):
        return self.fc(self.pool(self.conv(x).relu()).flatten(1))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        y = self.a(x).relu()
        y = torch.cat([self.b(y) + y, F.avg_pool2d(y, 3, 1, 1)], 1)
        return F.max_pool2d(y, 2)


MEANS = {
    "adaptive": nn.AdaptiveAvgPool2d(1), "mean": lambda y: y.mean((2, 3)), "kept": lambda y: y.mean((-1, -2), True),
}
X = torch.randn(2, 3, 8, 8)


@pytest.mark.medium
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", list(MEANS))
def test_the_mean_of_an_image_is_pooled_in_integers(name, tmp_path):
    sim = exported(Pooled(MEANS[name]), X, tmp_path / "out")
    kinds = optimized_kinds(tmp_path / "out")
    assert (kinds["QLinearGlobalAveragePool"], kinds["ReduceMean"], kinds["QGemm"]) == (1, 0, 1)
    for optimized in (False, True):
        assert steps(sim, X, tmp_path / "out", optimized=optimized).max() < 1.01


@pytest.mark.slow
def test_without_it_the_mean_is_float(tmp_path, monkeypatch):
    leave_out(monkeypatch, "pool_codes")
    exported(Pooled(MEANS["mean"]), X, tmp_path / "out")
    assert optimized_kinds(tmp_path / "out")["ReduceMean"] == 1


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("mean", [lambda y: y.mean((1, 3)), lambda y: y.mean(2).mean(2)])
def test_other_means_stay(mean, tmp_path):
    model = Pooled(mean)
    model.fc = nn.LazyLinear(5)
    model(X)
    sim = exported(model, X, tmp_path / "out")
    assert optimized_kinds(tmp_path / "out")["QLinearGlobalAveragePool"] == 0
    assert steps(sim, X, tmp_path / "out", optimized=False).max() < 1.01


@pytest.mark.medium
def test_sums_concatenations_and_pools_are_integer(tmp_path):
    rule = {"match": {"op": "concat"}, "output": {"bits": 8}}
    sim = exported(Residual(), X, tmp_path / "out", config={"version": 1, "extends": "onnxruntime", "rules": [rule]})
    kinds = optimized_kinds(tmp_path / "out")
    assert (kinds["QLinearConv"], kinds["QLinearAdd"], kinds["QLinearConcat"], kinds["QLinearAveragePool"]) == (
        2, 1, 1, 1
    )
    assert not kinds.keys() & {"Conv", "Add", "Concat", "AveragePool", "Relu"}
    assert steps(sim, X, tmp_path / "out", optimized=False).max() < 1.01


@pytest.mark.parametrize(("between", "pooled"), [("Reshape (mean, shape)", 1), ("Relu (mean)", 0)])
def test_a_mean_is_pooled_only_if_movement_alone_is_between_it_and_its_codes(between, pooled):
    text = f"""<ir_version: 10, opset_import: ["" : 21]>
    g (uint8[2,3,4,4] codes) => (uint8[2,3,1,1] y)
    <float scale = {{0.1}}, uint8 zero = {{0}}, int64[2] axes = {{2, 3}}, int64[4] shape = {{2, 3, 1, 1}}> {{
        x = DequantizeLinear (codes, scale, zero)
        mean = ReduceMean <keepdims = 1> (x, axes)
        moved = {between}
        y = QuantizeLinear (moved, scale, zero)
    }}"""
    model = ir.from_onnx_text(text)
    next(iter(model.graph)).outputs[0].shape = ir.Shape([2, 3, 4, 4])
    pool_codes(model.graph, ValueNames(model.graph))
    kinds = [node.op_type for node in model.graph]
    assert (kinds.count("GlobalAveragePool"), kinds.count("ReduceMean")) == (pooled, 1 - pooled)
