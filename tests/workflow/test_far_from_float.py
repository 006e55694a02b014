"""Files that compute what the simulation does, of simulations that are not what the model computes."""

import pytest
import torch
from torch import nn

import qtk
from qtk.calls.calls import Call
from qtk.report.verdict import OFF, Level
from qtk.workflow.far_from_float import far_from_float


class Inverse(nn.Module):
    """Divides by a difference of two products, of which 8 bits may leave 0; the second output is well."""

    def forward(self, x):
        a, b, c, d = x.unbind(1)
        return torch.stack([a, d], 1) / (a * d - b * c)[:, None], x * 2


class Difference(nn.Module):
    """Takes off what it has added, of which 8 bits hold nothing else."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, offset):
        return (self.linear(x) + offset) - offset


def singular(count):
    x = torch.rand(count, 4) + 1
    x[:, 3] = x[:, 1] * x[:, 2] / x[:, 0] * 1.001
    return x


def verdict_of(model, batches, tmp_path, **options):
    sim = qtk.QuantSim(model.eval(), batches[0], **options)
    sim.compute_encodings(batches[:1], progress=False)
    sim.export(tmp_path / "out", formats=("onnx",), progress=False)
    return sim.verify_export(tmp_path / "out", batches, turns=0, progress=False)


@pytest.mark.filterwarnings("ignore")
def test_a_simulation_that_returns_nan_is_red_also_where_a_later_call_does(tmp_path):
    torch.manual_seed(0)
    verdict = verdict_of(Inverse(), [torch.tensor([[2.0, 1, 1, 2], [1, 2, 2, 1]]), singular(64)], tmp_path,
                         config={"version": 1, "io": {"outputs": "float"}})
    assert verdict.level is Level.RED
    assert verdict.findings[0].cause.startswith("the simulation itself returns NaN or infinite values in output_0")


class Angle(nn.Module):
    """Computes with acosh, which is NaN below 1; a range of the input that ends there lets the simulation go below."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        return self.linear(torch.acosh(x * 1.0) * 2)


@pytest.mark.filterwarnings("ignore")
def test_a_file_is_not_blamed_for_a_simulation_of_nan_whose_first_site_compare_names(tmp_path):
    torch.manual_seed(0)
    x = 1 + 2 * torch.rand(64, 4)
    sim = qtk.QuantSim(Angle().eval(), x, config={"version": 1, "io": {"outputs": "float"}})
    sim.compute_encodings([x], progress=False)
    sim.set_range("x:input", low=-1, high=0.5)
    sim.export(tmp_path / "out", formats=("onnx",), progress=False)
    verdict = sim.verify_export(tmp_path / "out", [x], turns=0, progress=False)
    red = [finding.cause for finding in verdict.findings if finding.level is Level.RED]
    assert red == ["the simulation itself returns NaN or infinite values in output, which the float model does not"]
    errors = sim.compare([x], progress=False)
    assert [(error.site, error.not_finite) for error in errors[:3]] == [
        ("acosh:out", 256), ("mul_1:out", 256), ("x:input", 0)]
    assert "NaN or infinite values begin at acosh:out" in str(errors)
    assert "256, the first" in str(errors.top(1))


@pytest.mark.filterwarnings("ignore")
def test_a_simulation_far_from_the_float_model_is_yellow_whatever_the_file_computes(tmp_path):
    torch.manual_seed(0)
    verdict = verdict_of(Difference(), [(torch.randn(64, 4), 1000 * torch.randn(64, 4))], tmp_path)
    assert verdict.run(OFF).sqnr_db > 60
    finding, *_ = verdict.findings
    assert finding.level is Level.YELLOW
    assert "the simulation itself is " in finding.cause
    assert " dB from the float model in output, whatever the file computes" in finding.cause
    assert "sim.compare(data)" in finding.remedy


def test_a_simulation_near_the_float_model_is_green(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    verdict = verdict_of(net, [torch.randn(64, 4)], tmp_path, config="onnxruntime")
    assert verdict.findings == ()


def test_elements_that_do_not_count_have_no_part_in_it():
    model, x = qtk.prepare_model(nn.ReLU(), torch.ones(4)), torch.ones(4)
    spoilt, call = torch.tensor([1.0, torch.nan, -9, 1]), Call((x,), {}, None)
    counted = torch.tensor([True, False, False, True])
    assert far_from_float(model, call, [spoilt], [counted], ["y"]) == []
    assert far_from_float(model, call, [spoilt], [None], ["y"])[0].level is Level.RED
