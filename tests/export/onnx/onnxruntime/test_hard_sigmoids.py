"""Quantized hard sigmoids in ONNX Runtime's optimized graph: integer sums, with the codes of the simulation."""

import numpy as np
import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import nn

from qtk.export.onnx.stored_sites import stored_sites
from tests.export.onnx.onnxruntime.test_flat_linears import exported, optimized_kinds, steps
from tests.export.onnx.onnxruntime.test_fused_activations import Convolutions
from tests.exported_files import leave_out

X = 4 * torch.randn(2, 3, 8, 8)


class SqueezeExcite(nn.Module):
    def __init__(self, gate):
        super().__init__()
        self.conv, self.reduce, self.gate = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1), gate

    def forward(self, x):
        y = self.conv(x).relu()
        return y * self.gate(self.reduce(y.mean((2, 3), keepdim=True)))


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("activation", [nn.Hardswish, nn.Hardsigmoid])
def test_the_codes_of_all_inputs_are_those_of_the_simulation(activation, tmp_path):
    sim = exported(Convolutions(activation()), X, tmp_path / "out")
    kinds = optimized_kinds(tmp_path / "out")
    assert kinds["HardSigmoid"] == 0
    assert kinds["QLinearAdd"] == 1
    assert kinds["QLinearMul"] == (activation is nn.Hardswish)
    for optimized in (False, True):
        assert steps(sim, X, tmp_path / "out", optimized=optimized).max() < 1.01
    session = ReferenceEvaluator(str(tmp_path / "out" / "model.onnx"))
    (got,) = session.run(None, {session.input_names[0]: X.numpy()})
    scale = float(list(sim.encodings().values())[-1].scale)
    assert np.abs(got - sim.model(X).detach().numpy()).max() / scale < 1.01


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize(("gate", "kind"), [(nn.Hardsigmoid, "QLinearAdd"), (nn.Sigmoid, "QLinearSigmoid")])
def test_squeeze_and_excite_runs_in_integers(gate, kind, tmp_path):
    sim = exported(SqueezeExcite(gate()), X, tmp_path / "out")
    kinds = optimized_kinds(tmp_path / "out")
    assert (kinds[kind], kinds["QLinearMul"], kinds["Mul"], kinds["QLinearConv"]) == (1, 1, 0, 2)
    assert steps(sim, X, tmp_path / "out", optimized=True).max() < 1.01


@pytest.mark.medium
def test_its_constant_is_no_site(tmp_path):
    sim = exported(Convolutions(nn.Hardswish()), X, tmp_path / "out")
    names = {site.name for site in stored_sites(tmp_path / "out" / "model.onnx")}
    assert names == {site.name for site in sim.plan}
    assert "activation.gate:out" in names


@pytest.mark.medium
def test_another_range_stays_a_hard_sigmoid(tmp_path):
    rule = {"match": {"op": "hardsigmoid"}, "output": {"range": [0.0, 0.5]}}
    sim = exported(Convolutions(nn.Hardswish()), X, tmp_path / "out",
                   config={"version": 1, "extends": "onnxruntime", "rules": [rule]})
    assert optimized_kinds(tmp_path / "out")["HardSigmoid"] == 1
    assert steps(sim, X, tmp_path / "out", optimized=False).max() < 1.01


@pytest.mark.medium
def test_without_it_the_gate_is_float(tmp_path, monkeypatch):
    leave_out(monkeypatch, "add_hard_sigmoids")
    exported(Convolutions(nn.Hardswish()), X, tmp_path / "out")
    assert optimized_kinds(tmp_path / "out")["HardSigmoid"] == 1
    assert "HardSigmoid" in {node.op_type for node in onnx.load(tmp_path / "out" / "model.onnx").graph.node}
