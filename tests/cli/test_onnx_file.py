"""Exported files, called like their models."""

import builtins

import pytest
import torch

import qtk
from qtk.cli.model_source import build_model
from qtk.cli.onnx_file import OnnxFile, nested_like
from qtk.data.forward_pass import outputs
from qtk.errors import ExportError
from qtk.runtimes.session import require_onnxruntime
from tests.zoo.streams import frames, stream

pytest.importorskip("onnxruntime")


@pytest.fixture
def exported(project):
    """A simulation with a nested output, its file, and a batch."""
    batch = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    sim = qtk.QuantSim(build_model(f"{project.module}:dict_net"), batch)
    sim.compute_encodings([batch], progress=False)
    sim.export(project.folder / "export", formats=("onnx",))
    return sim, project.folder / "export" / "model.onnx", batch


@pytest.mark.medium
def test_the_file_gives_what_the_simulation_gives_nested_alike(exported):
    sim, path, batch = exported
    with torch.no_grad():
        simulated = sim.model(batch)
    runner = OnnxFile(path, sim.model)
    found = nested_like(simulated, runner(batch))
    assert found.keys() == simulated.keys() == {"scores", "hidden"}
    for name in found:
        scale = sim.encodings()[{"scores": "second:out", "hidden": "act:out"}[name]].scale
        assert (found[name] - simulated[name]).abs().max() <= scale * 1.001
    assert list(runner.parameters()) == []


@pytest.mark.medium
def test_buffers_go_on_and_can_be_put_back(tmp_path):
    batches = frames("cached_conv", 6)
    sim = qtk.QuantSim(stream("cached_conv"), batches[0], config="onnxruntime")
    sim.compute_encodings(batches, progress=False)
    sim.export(tmp_path / "out", formats=("onnx",), check=False)
    runner = OnnxFile(tmp_path / "out" / "model.onnx", sim.model)
    for found, simulated in zip(outputs(runner, batches), outputs(sim.model, batches), strict=True):
        assert (found[0] - simulated).abs().max() <= sim.encodings()["relu:out"].scale * 1.001
    assert all(float(buffer.abs().sum()) == 0 for buffer in runner.buffers())


@pytest.mark.medium
def test_a_batch_of_another_shape_is_an_error_with_the_file(exported):
    sim, path, _ = exported
    with pytest.raises(ExportError, match=r"model\.onnx: ONNX Runtime: "):
        OnnxFile(path, sim.model)(torch.zeros(5, 7))


@pytest.mark.medium
def test_a_file_that_is_no_onnx(exported, tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"nothing")
    with pytest.raises(ExportError, match=r"model\.onnx: ONNX Runtime .* cannot load it"):
        OnnxFile(tmp_path / "model.onnx", exported[0].model)


def test_without_onnxruntime_the_message_says_what_to_install(monkeypatch):
    original = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name == "onnxruntime":
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ExportError, match=r'pip install "qtk\[onnx\]"'):
        require_onnxruntime()
