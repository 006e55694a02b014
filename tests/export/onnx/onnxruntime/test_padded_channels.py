"""Convolutions of few channels: padded to four in files for ONNX Runtime, with the numbers of the simulation."""

import onnx
import pytest
import torch
from torch import nn

import qtk
from qtk.export.onnx.stored_sites import stored_sites
from qtk.report.verdict import Level
from qtk.runtimes.session import create_session
from qtk.runtimes.site_outputs import site_outputs
from qtk.workflow.quantized_source import quantized_source
from tests.export.onnx.onnxruntime.test_flat_linears import exported, optimized_kinds, steps
from tests.exported_files import leave_out

X = torch.randn(2, 3, 12, 12)


class Stem(nn.Module):
    """Convolutions that read an image: one to be padded, one with a large window, and a depthwise one with few results.
    """

    def __init__(self, channels=3):
        super().__init__()
        self.small, self.large = nn.Conv2d(channels, 16, 3, 2, 1), nn.Conv2d(channels, 16, 7, 2, 3)
        self.depthwise = nn.Conv2d(channels, channels, 3, groups=channels)

    def forward(self, x):
        return self.small(x).relu(), self.large(x), self.depthwise(x)


def weight_shapes(folder):
    """The shapes of the weights that convolutions multiply, in ONNX Runtime's optimized graph."""
    create_session(folder / "model.onnx", threads=1, optimized_file=folder / "optimized.onnx")
    graph = onnx.load(folder / "optimized.onnx").graph
    shapes = {each.name: tuple(each.dims) for each in graph.initializer}
    return sorted(shapes[node.input[3]] for node in graph.node if node.op_type == "QLinearConv")


@pytest.mark.medium
@pytest.mark.sample(1)
@pytest.mark.parametrize("channels", [1, 2, 3])
def test_small_windows_read_four_channels_and_give_the_simulated_codes(channels, tmp_path):
    x = torch.randn(2, channels, 12, 12)
    sim = exported(Stem(channels), x, tmp_path / "out")
    assert weight_shapes(tmp_path / "out") == sorted([(16, 4, 3, 3), (16, channels, 7, 7), (channels, 1, 3, 3)])
    for optimized in (False, True):
        session, _ = create_session(tmp_path / "out" / "model.onnx", optimized=optimized)
        for got, expected in zip(session.run(None, {"x": x.numpy()}), sim.model(x), strict=True):
            assert torch.equal(torch.from_numpy(got), expected)


@pytest.mark.medium
def test_what_reads_the_file_gets_the_weight_and_the_input_of_the_model(tmp_path):
    sim = exported(nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU()), X, tmp_path / "out")
    file = tmp_path / "out" / "model.onnx"
    stored = {site.name: site for site in stored_sites(file)}
    weight = stored["0.weight"]
    assert tuple(weight.node.inputs[0].shape) == (16, 4, 3, 3)
    assert torch.equal(weight.constant(), sim.quantizers["0.weight"](sim.model.get_parameter("0.weight")))
    assert torch.equal(quantized_source(file).constants["0.weight"], weight.constant())
    verdict = sim.verify_export(tmp_path / "out", [X])
    assert verdict.level is not Level.RED
    compared = {site.name: site for run in verdict.runs for site in run.sites if run.refusal is None}
    assert compared["input:input"].differing == 0
    (given,) = [each for each in site_outputs(file, codes=True) if each.site == "input:input"]
    assert given.lengths == ((1, 3),)


@pytest.mark.slow
def test_without_it_three_channels_are_read(tmp_path, monkeypatch):
    leave_out(monkeypatch, "pad_channels")
    exported(Stem(), X, tmp_path / "out")
    assert weight_shapes(tmp_path / "out") == sorted([(16, 3, 3, 3), (16, 3, 7, 7), (3, 1, 3, 3)])


@pytest.mark.medium
def test_a_file_for_any_runtime_has_the_channels_of_the_model(tmp_path):
    sim = exported(nn.Conv2d(3, 16, 3), X, tmp_path / "out", config="default")
    assert weight_shapes(tmp_path / "out") == [(16, 3, 3, 3)]
    assert steps(sim, X, tmp_path / "out", optimized=True).max() < 1.01


@pytest.mark.slow
def test_codes_of_any_zero_point_and_a_shared_weight_are_padded_once(tmp_path):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 16, 3)

        def forward(self, x, y):
            return self.conv(x).relu(), self.conv(y).relu()

    torch.manual_seed(0)
    pair = (torch.rand(2, 3, 8, 8) + 1, torch.randn(2, 3, 9, 9) - 2)
    sim = qtk.QuantSim(Twice().eval(), pair, config="onnxruntime")
    sim.compute_encodings([pair], progress=False)
    sim.export(tmp_path / "out", formats=["onnx"])
    assert weight_shapes(tmp_path / "out") == [(16, 4, 3, 3)] * 2
    stored = [each.name for each in onnx.load(tmp_path / "out" / "model.onnx").graph.initializer]
    assert sum(name.startswith("conv.weight") and "scale" not in name for name in stored) == 1
    session, _ = create_session(tmp_path / "out" / "model.onnx")
    feed = {each.name: value.numpy() for each, value in zip(session.get_inputs(), pair, strict=True)}
    for got, expected in zip(session.run(None, feed), sim.model(*pair), strict=True):
        assert torch.equal(torch.from_numpy(got), expected)
    assert optimized_kinds(tmp_path / "out")["QLinearConv"] == 2
