"""What an export says of files that compute otherwise than the simulation."""

import math
import warnings

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

import qtk
from qtk.calls.calls import Call
from qtk.report.difference import Difference
from qtk.runtimes.session import Optimizations
from qtk.workflow import export as module
from qtk.workflow.export_run import _are_near, _ops_are_right, departures
from tests.exported_files import RUN, leave_out
from tests.zoo.streams import frames, stream


@pytest.fixture(autouse=True)
def files_are_run(monkeypatch):
    monkeypatch.setattr(module, "_run", RUN)


def simulation(model, x):
    torch.manual_seed(0)
    sim = qtk.QuantSim(model.eval(), x)
    sim.compute_encodings([x], progress=False)
    return sim


def said(sim, folder, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sim.export(folder, formats=("onnx",), **options)
    return [str(each.message) for each in caught if "was written, but" in str(each.message)]


@pytest.fixture
def linear():
    return simulation(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)), torch.randn(32, 16))


@pytest.mark.medium
def test_of_a_file_that_computes_the_simulation_nothing_is_said(linear, tmp_path):
    assert said(linear, tmp_path / "out") == []


@pytest.mark.medium
def test_a_file_that_departs_is_named_with_the_output_and_the_way_on(linear, tmp_path):
    said(linear, tmp_path / "out")
    file = tmp_path / "out" / "model.onnx"
    spoilt = onnx.load(file)
    for tensor in spoilt.graph.initializer:
        if tensor.name == "2.weight.code" or (tensor.name.startswith("2.weight") and len(tensor.dims) == 2):
            array = numpy_helper.to_array(tensor)
            tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(-array), tensor.name))
    onnx.save(spoilt, file)
    (line,) = departures(file, linear.model, Call((torch.randn(32, 16),), {}, None))
    assert line.startswith("ONNX Runtime, optimizations off: output ")
    assert "dB from the simulation; sim.verify_export(directory, data)" in line


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        layers = [layer for _ in range(4) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())]
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x)


@pytest.mark.medium
@pytest.mark.parametrize("rounded", [False, True])
def test_a_bias_that_the_optimizer_rounds_is_no_amplification(rounded, tmp_path, monkeypatch):
    if rounded:
        leave_out(monkeypatch, "keep_float_biases")
    torch.manual_seed(0)
    x = torch.randn(4, 8, 12, 12)
    sim = qtk.QuantSim(Convolutions().eval(), x, weight_bits=4, activation_bits=4)
    sim.compute_encodings([x], progress=False)
    lines = said(sim, tmp_path / "out")
    assert [("optimizations on: output" in line) for line in lines] == ([True] if rounded else [])
    call = Call((x,), {}, None)
    names = [port.name for port in sim.model.graph.find_nodes(op="placeholder")]
    are_right = _ops_are_right(tmp_path / "out" / "model.onnx", sim.model, call, {names[0]: x}, Optimizations.ON)
    assert are_right != rounded


def test_the_optimizations_may_amplify_about_as_much_as_a_run_without_them():
    def outputs(sqnr_db):
        return [Difference("y", 100, 0.5, 0.3, 1.0, 9.0, sqnr_db)]

    assert _are_near(outputs(13.0), outputs(18.0))
    assert not _are_near(outputs(11.0), outputs(18.0))
    both = [outputs(each)[0] for each in (math.inf, 13.0)], [outputs(each)[0] for each in (math.inf, 18.0)]
    assert _are_near(*both)  # one output is exact in both runs
    assert not _are_near(both[0], [outputs(math.nan)[0], both[1][1]])
    assert not _are_near(outputs(13.0), [])  # without them the outputs are those of the simulation


@pytest.mark.medium
def test_a_file_that_no_runtime_opens_is_named_with_the_way_out(tmp_path, monkeypatch):
    x = torch.randn(2, 3, 8, 8).double()
    sim = simulation(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).double(), x)
    monkeypatch.setattr("qtk.export.onnx.qdq.compute_in_float32", lambda model: ())
    (line,) = said(sim, tmp_path / "out")
    assert "model.onnx was written, but ONNX Runtime, optimizations off, does not run it" in line
    assert "simulate and export model.float() instead" in line


@pytest.mark.medium
def test_the_run_can_be_left_out(linear, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_run", lambda *_: pytest.fail("runs"))
    assert said(linear, tmp_path / "out", check=False) == []


@pytest.mark.medium
def test_a_file_is_run_from_the_buffers_that_the_model_has_now(tmp_path):
    torch.manual_seed(0)
    sim = qtk.QuantSim(stream("cached_conv"), frames("cached_conv", 1)[0])
    sim.compute_encodings(frames("cached_conv", 8), progress=False)
    with torch.no_grad():
        sim.model.past.copy_(torch.rand(1, 4, 2))
    held = sim.model.past.clone()
    assert said(sim, tmp_path / "out") == []
    assert torch.equal(sim.model.past, held)
    model = onnx.load(tmp_path / "out" / "model.onnx")
    wrong = next(each for each in model.graph.initializer if each.name == "concat:out.scale")
    wrong.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(wrong) * 16, wrong.name))
    onnx.save(model, tmp_path / "out" / "model.onnx")
    (line,) = departures(tmp_path / "out" / "model.onnx", sim.model, Call(sim.example_inputs, {}, None))
    assert "dB from the simulation" in line
