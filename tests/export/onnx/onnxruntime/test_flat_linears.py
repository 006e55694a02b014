"""Linear layers on several axes in ONNX Runtime's optimized graph: one QGemm each, and the values of the simulation."""

from collections import Counter

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import qtk
from qtk.runtimes.session import create_session


class Mlp(nn.Module):
    def __init__(self, activation, *, bias=True):
        super().__init__()
        self.up, self.activation, self.down = nn.Linear(16, 32, bias=bias), activation, nn.Linear(32, 8, bias=bias)

    def forward(self, x):
        return self.down(self.activation(self.up(x)))


def exported(model, x, folder, *, dynamic_shapes="batch", config="onnxruntime", **widths):
    torch.manual_seed(0)
    sim = qtk.QuantSim(qtk.prepare_model(model.eval(), x, dynamic_shapes=dynamic_shapes), x, config=config, **widths)
    sim.compute_encodings([x], progress=False)
    sim.export(folder, formats=["onnx"])
    return sim


def optimized_kinds(folder):
    create_session(folder / "model.onnx", threads=1, optimized_file=folder / "optimized.onnx")
    return Counter(node.op_type for node in onnx.load(folder / "optimized.onnx").graph.node)


def steps(sim, x, folder, *, optimized):
    session, _ = create_session(folder / "model.onnx", optimized=optimized)
    (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    scale = float(list(sim.encodings().values())[-1].scale)
    return np.abs(got - sim.model(x).detach().numpy()) / scale


@pytest.mark.sample(2)
@pytest.mark.medium
@pytest.mark.parametrize("shape", [(2, 5, 16), *(pytest.param(shape, marks=pytest.mark.slow) for shape in (
    (4, 16), (2, 3, 5, 16)))])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Identity])
def test_every_linear_layer_becomes_one_qgemm(activation, shape, tmp_path):
    x, folder = torch.randn(*shape), tmp_path / "out"
    sim = exported(Mlp(activation()), x, folder)
    kinds = optimized_kinds(folder)
    assert kinds["QGemm"] == 2
    assert not kinds.keys() & {"Gemm", "FusedGemm", "MatMul", "MatMulIntegerToFloat", "MatMulNBits", "Relu"}
    for optimized in (False, True):
        difference = steps(sim, x, folder, optimized=optimized)
        assert difference.max() < 1.01
        assert (difference > 0.01).mean() < 0.02


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize(("dynamic_shapes", "shape"), [("batch", (7, 5, 16)), ("all", (3, 9, 16))])
def test_lengths_stay_dynamic(dynamic_shapes, shape, tmp_path):
    folder = tmp_path / "out"
    sim = exported(Mlp(nn.GELU()), torch.randn(2, 5, 16), folder, dynamic_shapes=dynamic_shapes)
    assert steps(sim, torch.randn(*shape), folder, optimized=False).max() < 1.01
    assert optimized_kinds(folder)["QGemm"] == 2


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize(("config", "bias"), [("default", True), ("onnxruntime", False)])
def test_without_an_int32_bias_it_stays_a_matmul(config, bias, tmp_path):
    exported(Mlp(nn.GELU(), bias=bias), torch.randn(2, 5, 16), tmp_path / "out", config=config)
    kinds = Counter(node.op_type for node in onnx.load(tmp_path / "out" / "model.onnx").graph.node)
    assert (kinds["MatMul"], kinds["Gemm"]) == (2, 0)


class Cascade(nn.Module):
    """Returns what one linear layer computes, and what another one makes of it."""

    def __init__(self, *, returns_both):
        super().__init__()
        self.first, self.second, self.returns_both = nn.Linear(16, 8), nn.Linear(8, 4), returns_both

    def forward(self, x):
        y = self.first(x)
        return (y, self.second(y)) if self.returns_both else (y,)


@pytest.mark.parametrize("returns_both", [False, True])
def test_a_float_output_of_a_linear_layer_stays_an_output(returns_both, tmp_path):
    torch.manual_seed(0)
    config = {"version": 1, "extends": "onnxruntime", "rules": [{"match": {"path": "first"}, "output": "float"}]}
    x = torch.randn(2, 5, 16)
    sim = exported(Cascade(returns_both=returns_both), x, tmp_path / "out", config=config)
    session, _ = create_session(tmp_path / "out/model.onnx")
    got = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    wanted = sim.model(x)
    assert len(got) == len(wanted) == 1 + returns_both
    np.testing.assert_allclose(got[0], wanted[0].detach(), atol=1e-5)
    if returns_both:  # a value beside the edge of two codes may take the other one
        step = float(sim.encodings()["second:out"].scale)
        np.testing.assert_allclose(got[1], wanted[1].detach(), atol=1.01 * step)
