"""Gates of channels, repeated along rows in files for ONNX Runtime, with the numbers of the simulation."""

import onnx
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.export.onnx.onnxruntime.test_flat_linears import exported, optimized_kinds
from tests.exported_files import leave_out


class Excited(nn.Module):
    """A squeeze-and-excitation block between convolutions; what it makes is read by one, or returned."""

    def __init__(self, *, returned=False):
        super().__init__()
        self.first, self.last = nn.Conv2d(4, 16, 3, padding=1), nn.Conv2d(16, 8, 1)
        self.reduce, self.expand, self.returned = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1), returned

    def forward(self, x):
        x = self.first(x).relu()
        gate = F.hardsigmoid(self.expand(self.reduce(F.adaptive_avg_pool2d(x, 1)).relu()))
        y = x * gate
        return y if self.returned else self.last(y)


X = torch.randn(2, 4, 6, 10)


def repeats(folder):
    """What each Tile repeats along the axes."""
    graph = onnx.load(folder / "model.onnx").graph
    constants = {each.name: onnx.numpy_helper.to_array(each).tolist() for each in graph.initializer}
    return [constants[node.input[1]] for node in graph.node if node.op_type == "Tile"]


@pytest.mark.medium
def test_a_gate_is_repeated_along_the_rows_of_its_image(tmp_path):
    sim = exported(Excited(), X, tmp_path / "out")
    assert repeats(tmp_path / "out") == [[1, 1, 1, 10]]
    kinds = optimized_kinds(tmp_path / "out")
    assert (kinds["QLinearMul"], kinds["Tile"], kinds["Mul"]) == (1, 1, 0)
    assert kinds["Transpose"] <= 2  # at the input and the output: what is repeated stays as the kernels have it
    verdict = sim.verify_export(tmp_path / "out", [X])
    runs = [run for run in verdict.runs if run.refusal is None]
    assert [run.total.max_steps < 0.01 for run in runs] == [True] * len(runs)
    gates = [site for run in runs for site in run.sites if site.name == "hardsigmoid:out"]
    assert gates
    assert not any(site.other_codes for site in gates)


@pytest.mark.slow
@pytest.mark.parametrize("returned", [False, True])
def test_without_it_or_where_the_product_leaves_the_model_it_is_not(returned, tmp_path, monkeypatch):
    if not returned:
        leave_out(monkeypatch, "repeat_gates")
    exported(Excited(returned=returned), X, tmp_path / "out")
    assert repeats(tmp_path / "out") == []
