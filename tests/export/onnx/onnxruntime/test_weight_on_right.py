"""Products with a weight that is not their right factor, in ONNX Runtime's optimized graph: integers, as simulated."""

import numpy as np
import pytest
import torch
from torch import nn

from qtk.runtimes.session import create_session
from tests.export.onnx.onnxruntime.test_flat_linears import exported, optimized_kinds, steps
from tests.exported_files import leave_out


class Left(nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.left, self.activation = nn.Parameter(torch.randn(6, 5)), activation

    def forward(self, x):
        return self.activation(self.left @ x)


class Einsum(nn.Module):
    def __init__(self, equation, shape):
        super().__init__()
        self.equation, self.weight = equation, nn.Parameter(torch.randn(shape))

    def forward(self, x):
        return torch.einsum(self.equation, x, self.weight)


X = torch.randn(7, 5, 8)
RIGHT = {
    "left": lambda: Left(nn.Identity()),
    "left, relu": lambda: Left(nn.ReLU()),
    "einsum": lambda: Einsum("bij,jk->bik", (8, 4)),
    "einsum, transposed": lambda: Einsum("bij,kj->bik", (4, 8)),
    "einsum, any rows": lambda: Einsum("...j,jk->...k", (8, 4)),
}


@pytest.mark.sample(2)
@pytest.mark.medium
@pytest.mark.parametrize("dynamic_shapes", [pytest.param("batch", marks=pytest.mark.slow), "all"])
@pytest.mark.parametrize("name", list(RIGHT))
def test_the_product_runs_in_integers(name, dynamic_shapes, tmp_path):
    sim = exported(RIGHT[name](), X, tmp_path / "out", dynamic_shapes=dynamic_shapes)
    kinds = optimized_kinds(tmp_path / "out")
    assert not kinds.keys() & {"MatMul", "FusedMatMul", "Gemm", "Einsum"}
    assert sum(kinds[kind] for kind in ("QLinearMatMul", "MatMulIntegerToFloat", "QGemm")) == 1
    for optimized in (False, True):
        difference = steps(sim, X, tmp_path / "out", optimized=optimized)
        assert difference.max() < 1.01
        assert (difference > 0.01).mean() < 0.02


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("config", ["dynamic", {"version": 1, "defaults": {"activation": "float"}}])
@pytest.mark.parametrize("name", ["left", "einsum"])
def test_other_targets_compute_the_same(name, config, tmp_path):
    sim = exported(RIGHT[name](), X, tmp_path / "out", config=config)
    session, _ = create_session(tmp_path / "out" / "model.onnx")
    (got,) = session.run(None, {"x": X.numpy()})
    expected = sim.model(X).detach().numpy()
    assert np.abs(got - expected).max() <= 1.01 * np.abs(expected).max() / 255


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("name", ["left", "einsum"])
def test_without_it_the_product_is_float(name, tmp_path, monkeypatch):
    leave_out(monkeypatch, "move_weight_to_rhs")
    exported(RIGHT[name](), X, tmp_path / "out")
    assert optimized_kinds(tmp_path / "out").keys() & {"MatMul", "FusedMatMul", "Einsum"}


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize(
    ("equation", "shape"), [("bij,jk->bki", (8, 4)), ("bij,bj->bi", (7, 8)), ("bij,ij->bi", (5, 8))]
)
def test_other_equations_stay_einsum(equation, shape, tmp_path):
    sim = exported(Einsum(equation, shape), X, tmp_path / "out", dynamic_shapes="batch" if shape[0] != 7 else None)
    assert optimized_kinds(tmp_path / "out")["Einsum"] == 1
    assert steps(sim, X, tmp_path / "out", optimized=True).max() < 1.01
