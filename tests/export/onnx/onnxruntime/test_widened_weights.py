"""Weights of 4 bits in integer kernels of ONNX Runtime: stored in 4 bits, with the numbers of the simulation."""

import onnx
import pytest
import torch
from torch import nn

from qtk.export.onnx.file_contents import read_contents
from qtk.export.onnx.stored_sites import stored_sites
from qtk.report.verdict import Level
from tests.export.onnx.onnxruntime.test_flat_linears import exported, optimized_kinds
from tests.exported_files import leave_out

X = torch.randn(4, 3, 9, 9)


def net():
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3, groups=16), nn.ReLU(),
                         nn.Flatten(), nn.Linear(400, 7))


def stored(folder):
    graph = onnx.load(folder / "model.onnx").graph
    return {each.name: each.data_type for each in graph.initializer if each.name.endswith("weight")}


@pytest.mark.medium
@pytest.mark.sample(1)
@pytest.mark.parametrize("weight", [{}, {"weight": {"dtype": "uint4", "symmetric": False}}])
def test_products_are_integer_and_codes_stay_in_four_bits(weight, tmp_path):
    config = {"version": 1, "extends": "onnxruntime", "rules": [{"match": {"op": ["conv", "linear"]}, **weight}] * bool(
        weight)}
    sim = exported(net(), X, tmp_path / "out", config=config, weight_bits=4)
    kinds = optimized_kinds(tmp_path / "out")
    if not weight:
        assert (kinds["QLinearConv"], kinds["Conv"], kinds["Cast"]) == (2, 0, 0)
        assert set(stored(tmp_path / "out").values()) == {onnx.TensorProto.INT4}
    verdict = sim.verify_export(tmp_path / "out", [X])
    assert verdict.level is not Level.RED
    assert all(run.total.max_steps < 1.01 for run in verdict.runs if run.refusal is None)


@pytest.mark.medium
def test_what_reads_the_file_sees_weights_of_four_bits(tmp_path):
    sim = exported(net(), X, tmp_path / "out", weight_bits=4)
    file = tmp_path / "out" / "model.onnx"
    weights = {site.name: site.constant() for site in stored_sites(file) if site.name.endswith("weight")}
    assert len(weights) == 3
    for name, value in weights.items():
        assert torch.equal(value, sim.quantizers[name](sim.model.get_parameter(name)))
    roles = [(each.role, each.dtype) for each in read_contents(file).tensors if each.dtype == "int4"]
    assert roles == [("weights", "int4")] * 3


@pytest.mark.slow
def test_without_it_they_are_float(tmp_path, monkeypatch):
    leave_out(monkeypatch, "widen_weights")
    exported(net(), X, tmp_path / "out", weight_bits=4)
    assert optimized_kinds(tmp_path / "out")["QLinearConv"] == 0


@pytest.mark.medium
@pytest.mark.parametrize("activation", [nn.ReLU, nn.GELU])  # codes behind the first Gemm, floats
def test_gemms_are_integer_too(activation, tmp_path):
    exported(nn.Sequential(nn.Linear(16, 32), activation(), nn.Linear(32, 8)), torch.randn(4, 16), tmp_path / "out",
             weight_bits=4)
    assert optimized_kinds(tmp_path / "out")["QGemm"] == 2
