"""A file returns in each runtime what the simulation does, to rounding."""

import importlib.util

import pytest
import torch
from torch import nn

import qtk
from qtk.errors import ExportError
from qtk.runtimes.file_outputs import RUNTIMES, FileOutputs

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.medium
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_file_returns_what_the_simulation_does(runtime, tmp_path):
    if runtime == "openvino" and importlib.util.find_spec("openvino") is None:
        pytest.skip("openvino is not installed")
    torch.manual_seed(0)
    sim = qtk.QuantSim(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval(), X)
    sim.compute_encodings([X], progress=False)
    sim.export(tmp_path / "out", formats=("onnx",), check=False)
    file = FileOutputs(tmp_path / "out" / "model.onnx", runtime)
    (found,) = file.run({name: X for name in file.inputs})
    with torch.no_grad():
        expected = sim.model(X)
    step = float(sim.encodings()["2:out"].scale)
    assert float((found - expected).abs().max()) < 1.01 * step
    assert float((found - expected).abs().mean()) < 0.05 * step
    assert file.runtime.startswith("OpenVINO" if runtime == "openvino" else "ONNX Runtime")


def test_an_unknown_runtime_names_the_known_ones(tmp_path):
    with pytest.raises(ExportError, match="unknown runtime 'onnxruntime-of'; did you mean 'onnxruntime-off'"):
        FileOutputs(tmp_path / "model.onnx", "onnxruntime-of")
