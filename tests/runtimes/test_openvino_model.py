"""Needs OpenVINO: ``pip install "qtk[openvino]"``."""

import importlib.util
import warnings

import pytest
import torch
from torch import nn

import qtk
from qtk.demo.digits import load_digits_split
from qtk.demo.models import build
from qtk.errors import ExportError
from qtk.report.verdict import OPENVINO, Level
from qtk.runtimes import openvino_model
from qtk.runtimes.openvino_model import OpenVinoModel

needs_openvino = pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="openvino is not installed")


def test_without_openvino_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(openvino_model, "has_openvino", lambda: False)
    with pytest.raises(ExportError, match=r'pip install "qtk\[openvino\]"'):
        OpenVinoModel(tmp_path / "model.onnx")


@needs_openvino
def test_a_broken_file_is_refused_with_its_name(tmp_path):
    (tmp_path / "model.onnx").write_text("no protobuf")
    with pytest.raises(ExportError, match=r"model\.onnx: OpenVINO .* cannot compile it"):
        OpenVinoModel(tmp_path / "model.onnx")


@needs_openvino
def test_a_linear_layer_runs_in_integers(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(16, 32)
    sim = qtk.QuantSim(nn.Linear(32, 8).eval(), x, config="openvino")
    sim.compute_encodings([x], progress=False)
    sim.export(tmp_path / "out", formats=["onnx"])
    model = OpenVinoModel(tmp_path / "out" / "model.onnx")
    assert model.nodes().integer["FullyConnected"] == 1
    (output,) = model.run({"input": x})
    with torch.no_grad():
        steps = (output - sim.model(x)).abs() / sim.quantizers["linear:out"].scale
    assert steps.max() <= 1.001


@needs_openvino
def test_products_with_codes_of_4_bits_are_in_float(tmp_path):
    """It names such a node by the type of its weights."""
    torch.manual_seed(0)
    sim = qtk.QuantSim(nn.Sequential(nn.Linear(16, 8)), torch.randn(4, 16), config="openvino", weight_bits=4)
    sim.compute_encodings([torch.randn(64, 16)], progress=False)
    sim.export(tmp_path / "out", formats=("onnx",))
    nodes = OpenVinoModel(tmp_path / "out" / "model.onnx").nodes()
    assert [(node.kind, node.reason) for node in nodes.weighted_floats] == [
        ("FullyConnected", "OpenVINO runs it in f32")]



class Concatenating(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.both = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(16, 8, 1)

    def forward(self, x):
        return self.both(torch.cat([self.a(x), torch.relu(self.b(x))], 1))


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.fc = nn.Embedding(20, 16), nn.Linear(16, 8)

    def forward(self, ids):
        return self.fc(self.embed(ids))


@needs_openvino
@pytest.mark.parametrize(("build", "x"), [
    (Concatenating, torch.linspace(-2, 3, 1024).reshape(2, 8, 8, 8)), (Embedded, torch.arange(20).reshape(2, 10)),
])
def test_layers_behind_concatenations_and_embeddings_compute_what_is_simulated(build, x, tmp_path):
    torch.manual_seed(0)
    sim = qtk.QuantSim(build().eval(), x, config="openvino")
    sim.compute_encodings([x], progress=False)
    sim.export(tmp_path / "out", formats=["onnx"])
    (name,) = sim.model.graph.find_nodes(op="placeholder")
    (output,) = OpenVinoModel(tmp_path / "out" / "model.onnx").run({str(name): x})
    with torch.no_grad():
        expected = sim.model(x)
    step = [each.encoding.scale for site, each in sim.quantizers.items() if site.endswith(":out")][-1]
    assert (output - expected).abs().max() <= 1.001 * step


@needs_openvino
@pytest.mark.parametrize("name", ["digits_cnn", "digits_vit", "digits_lstm"])
def test_the_target_openvino_agrees_there(name, tmp_path):
    pytest.importorskip("sklearn")
    digits = load_digits_split()
    sim = qtk.QuantSim(build(name), digits.test_images[:2], config="openvino")
    sim.compute_encodings(digits.train_images[:512].split(128), progress=False)
    with warnings.catch_warnings(action="ignore"):
        sim.export(tmp_path / "out", formats=["onnx"])
    verdict = sim.verify_export(tmp_path / "out", digits.test_images.split(128), runtime="openvino", turns=0)
    assert verdict.run(OPENVINO).top1 >= 0.99
    assert verdict.level is not Level.RED


@needs_openvino
def test_a_file_for_onnxruntime_is_told_to_be_wrong_there(tmp_path):
    pytest.importorskip("sklearn")
    digits = load_digits_split()
    sim = qtk.QuantSim(build("digits_vit"), digits.test_images[:2], config="onnxruntime")
    sim.compute_encodings(digits.train_images[:512].split(128), progress=False)
    sim.export(tmp_path / "out", formats=["onnx"])
    verdict = sim.verify_export(tmp_path / "out", digits.test_images.split(128), runtime="openvino", turns=0)
    assert verdict.level is Level.RED
    assert "config='openvino'" in verdict.findings[0].remedy
