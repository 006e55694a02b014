import importlib.util
import sys

import pytest
import torch
from torch import nn

import qtk
from qtk.auto.site_rules import SiteRules
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


class Similarities(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, x):
        return self.left(x) @ self.right(x).t()


class Projection(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.weight = nn.Linear(16, 8), nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return self.layer(x).relu() @ self.weight


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Conv2d(16, 16, 3, padding=1) for _ in range(3))
        self.last = nn.Linear(16, 5)

    def forward(self, x):
        x = self.first(x[:, :, None, None].expand(-1, -1, 5, 5)).relu()
        x = (x + self.third(self.second(x).relu())).relu()
        return self.last(x.mean((2, 3)))


def convolutions():
    return nn.Sequential(nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 4, 3), nn.ReLU(), nn.ConvTranspose2d(4, 4, 3),
                         nn.Flatten(), nn.Linear(64, 5))


@needs_executorch
@pytest.mark.parametrize(("build", "floats", "left"), [
    (lambda: nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 5)), ["2:out"], ["addmm"]),
    (convolutions, ["3:out"], ["convolution"]),
    (Residual, ["relu:out"], ["convolution"]),
    (Residual, ["third:out"], ["convolution"]),
    (Similarities, [], ["mm"]),
    (Projection, [], ["mm"]),
], ids=["linear", "transposed convolution", "input", "residual", "two values", "parameter"])
def test_what_surrounds_a_product_in_float_is_written_for_each_number_of_rows(build, floats, left, tmp_path):
    torch.manual_seed(0)
    model, x = build().eval(), torch.randn(4, 16)
    plan = qtk.QuantSim(model, x, config="xnnpack")
    config = SiteRules(plan.simulation).precise(plan.config, floats, "float")
    sim = qtk.QuantSim(model, x, config=config)
    sim.compute_encodings([torch.randn(64, 16)], progress=False)
    sim.export(tmp_path, formats="pt2e")
    program = ExecuTorchProgram(tmp_path / "model.pt2", {})
    assert sorted(node.kind for node in program.nodes().floats if node.reason == "not delegated") == left
    for rows in (1, 3, 4):
        x = torch.randn(rows, 16)
        (result,), simulated = program.run({program.inputs[0]: x})["output"], sim.model(x)
        assert result.shape == simulated.shape
        assert (result - simulated).abs().max() <= 0.02 * simulated.abs().max()
