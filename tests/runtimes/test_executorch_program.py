import importlib.util
import sys

import pytest
import torch
from torch import nn

import qtk
from qtk.errors import ExportError
from qtk.report.verdict import Level
from qtk.runtimes.executorch_program import ExecuTorchProgram

needs_executorch = pytest.mark.skipif(
    importlib.util.find_spec("executorch") is None, reason="executorch is not installed")


def test_without_executorch_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "executorch", None)
    monkeypatch.setitem(sys.modules, "executorch.backends.xnnpack.partition.xnnpack_partitioner", None)
    with pytest.raises(ExportError, match=r"pip install 'qtk\[executorch\]'"):
        ExecuTorchProgram(tmp_path / "model.pt2", {})


@needs_executorch
def test_layers_run_in_integers_for_more_rows_than_the_example_has(tmp_path):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 5)).eval(), torch.randn(4, 16)
    sim = qtk.QuantSim(model, x, config="xnnpack")
    sim.compute_encodings([torch.randn(64, 16)], progress=False)
    sim.export(tmp_path / "out", formats="pt2e")
    verdict = sim.verify_export(tmp_path / "out", [x, torch.randn(9, 16)], runtime="executorch", turns=0)
    (run,) = verdict.runs
    assert verdict.level is Level.GREEN
    assert (run.nodes.integers(), run.nodes.floats, run.total.elements) == ("2 linear", (), 13 * 5)
    assert run.total.max_steps <= 1.001
