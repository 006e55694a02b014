"""A softmax of codes in ONNX Runtime's optimized graph: its float operator, with the codes of the simulation."""

import numpy as np
import pytest
import torch
from torch import nn

from qtk.runtimes.executed_nodes import executed_nodes
from qtk.runtimes.session import create_session
from tests.export.onnx.onnxruntime.test_flat_linears import exported, optimized_kinds
from tests.exported_files import leave_out


class Moved(nn.Module):
    def forward(self, x):
        return x.unflatten(0, (-1, 4)).transpose(1, 2).softmax(1)


class Pooled(nn.Module):
    def forward(self, x):
        return nn.functional.max_pool2d(x[None, None], (2, 1)).flatten(0, 2).softmax(-1)


def scores(experts, spread):
    """Near to one another where ``spread`` is small: the scale of their softmax is then far below 1/255."""
    return spread * torch.randn(256, experts, generator=torch.Generator().manual_seed(0))


def differing_codes(sim, x, folder, *, optimized):
    session, _ = create_session(folder / "model.onnx", optimized=optimized)
    (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    scale = float(list(sim.encodings().values())[-1].scale)
    return np.abs(np.round((got - sim.model(x).detach().numpy()) / scale))


MODELS = {"last axis": lambda: nn.Softmax(-1), "first axis": lambda: nn.Softmax(0), "moved": Moved, "pooled": Pooled}


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.pairwise(experts=(2, 4, 8), spread=(0.01, 0.1, 1.0), name=MODELS)
def test_codes_are_those_of_the_simulation(experts, spread, name, tmp_path):
    make = MODELS[name]
    x = scores(experts, spread)
    sim = exported(make(), x, tmp_path / "out", config="default")
    kinds = optimized_kinds(tmp_path / "out")
    assert (kinds["Softmax"], kinds["QLinearSoftmax"]) == (1, 0)
    for optimized in (False, True):
        difference = differing_codes(sim, x, tmp_path / "out", optimized=optimized)
        assert difference.max() <= 1
        assert (difference > 0).mean() < 0.002


@pytest.mark.medium
def test_scores_in_float_are_read_as_they_are(tmp_path):
    exported(nn.Sequential(nn.Linear(16, 4), nn.Softmax(-1)), torch.randn(64, 16), tmp_path / "out")
    assert optimized_kinds(tmp_path / "out")["Max"] == 0


@pytest.mark.medium
def test_without_it_the_integer_operator_computes_other_codes(tmp_path, monkeypatch):
    leave_out(monkeypatch, "keep_softmax_float")
    x = scores(4, 1.0)
    sim = exported(nn.Softmax(-1), x, tmp_path / "out", config="default")
    assert optimized_kinds(tmp_path / "out")["QLinearSoftmax"] == 1
    assert (differing_codes(sim, x, tmp_path / "out", optimized=True) > 0).mean() > 0.01


@pytest.mark.medium
def test_its_reason_is_named(tmp_path):
    exported(Moved(), scores(4, 1.0), tmp_path / "out", config="default")
    optimized_kinds(tmp_path / "out")
    found = executed_nodes(tmp_path / "out" / "optimized.onnx", tmp_path / "out" / "model.onnx", {})
    reasons = {node.kind: node.reason for node in found.floats}
    assert reasons["Softmax"] == "ONNX Runtime's integer Softmax computes other codes than the simulation"
