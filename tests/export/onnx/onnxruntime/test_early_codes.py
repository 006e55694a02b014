"""A product is computed in integers where its result is moved or bounded before it is quantized."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import qtk
from tests.export.onnx.optimized import kinds
from tests.export.onnx.simulated import run_onnx
from tests.exported_files import leave_out


class Causal(nn.Module):
    """Two causal convolutions and a residual, as a temporal convolutional network has them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv1d(4, 8, 3, padding=2), nn.Conv1d(8, 8, 3, padding=4, dilation=2)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        first = self.first(x)[:, :, :-2].relu()
        return self.head((self.second(first)[:, :, :-4].relu() + first).relu()[:, :, -1])


class Enlarging(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Conv2d(4, 16, 3, padding=1), nn.Conv2d(4, 3, 3, padding=1)

    def forward(self, x):
        return self.narrow(functional.relu6(functional.pixel_shuffle(self.wide(x), 2)))


class Seen(nn.Module):
    """What is left out of the slice is read too."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv1d(4, 8, 3, padding=2), nn.Conv1d(8, 3, 1)

    def forward(self, x):
        y = self.conv(x)
        return self.head(y[:, :, :-2].relu()), y.tanh()


class Turned(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv1d(4, 8, 3), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.conv(x).transpose(1, 2).relu())


class Bounded(nn.Module):
    """Bounds of which codes are not: 0 lies in the middle, or the bounds are wider on one side."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 3)

    def forward(self, x):
        first = functional.hardtanh(3 * self.first(x), -1, 1)
        second = (self.second(first) + first).clamp(-0.7, 0.5)
        return self.head(second.mean((2, 3))).clamp(max=0.1)


class Pooled(nn.Module):
    """A MaxPool in front of its Relu, an image enlarged by repetition, its largest values, and whole bounds."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = functional.max_pool2d(self.first(x), 3, 2, 1).relu()
        x = functional.interpolate(self.second(x).clamp(0, 0.7), scale_factor=2)
        return self.head(self.third(x).amax((2, 3)).relu())


def exported(model, x, directory, **settings):
    torch.manual_seed(0)
    sim = qtk.QuantSim(model.eval(), x, config=settings.pop("config", "onnxruntime"))
    sim.compute_encodings([x], progress=False)
    sim.export(directory, formats=("onnx",), progress=False, **settings)
    return sim, directory / "model.onnx"


@pytest.mark.sample(4)
@pytest.mark.medium
@pytest.mark.parametrize(("model", "shape", "counts"), [
    (Causal, (2, 4, 16), {"QLinearConv": 2, "QGemm": 1, "Conv": 0}),
    (Enlarging, (2, 4, 6, 6), {"QLinearConv": 2, "DepthToSpace": 1, "Conv": 0}),
    (Turned, (2, 4, 8), {"QLinearConv": 1, "Conv": 0}),
    (Bounded, (2, 4, 8, 8), {"QLinearConv": 2, "QLinearAdd": 1, "QGemm": 1, "Conv": 0, "FusedConv": 0}),
    (Pooled, (2, 4, 8, 8), {"QLinearConv": 3, "QGemm": 1, "Conv": 0, "Resize": 1, "ReduceMax": 1}),
])
@pytest.mark.parametrize("settings", [{}, {"opset": 21}, {"config": "onnxruntime_vnni"}], ids=str)
def test_products_are_computed_in_integers(model, shape, counts, settings, tmp_path):
    """In integers, and with the numbers of the simulation."""
    sim, path = exported(model(), x := torch.randn(shape), tmp_path / "out", **settings)
    found = kinds(path)
    assert {kind: found[kind] for kind in counts} == counts
    assert found["Relu"] == 0
    with torch.no_grad():
        expected = sim.model(x)
    step = max(float(encoding.scale.max()) for name, encoding in sim.encodings().items() if ":" in name)
    for optimized in (False, True):
        (given,) = run_onnx(path, x, optimized=optimized)
        assert float((expected - torch.from_numpy(given)).abs().max()) <= step * 1.001


@pytest.mark.medium
def test_convolutions_write_activations_of_few_bits(tmp_path):
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    config = {"version": 1, "extends": "onnxruntime", "defaults": {"activation": {"bits": 4}}}
    sim, path = exported(model, x := torch.randn(2, 4, 8, 8), tmp_path / "out", config=config)
    found = kinds(path)
    assert (found["QLinearConv"], found["Conv"], found["FusedConv"]) == (2, 0, 0)
    with torch.no_grad():
        expected = sim.model(x)
    for optimized in (False, True):
        torch.testing.assert_close(torch.from_numpy(run_onnx(path, x, optimized=optimized)[0]), expected)


@pytest.mark.medium
def test_without_the_rewrite_they_are_not(tmp_path, monkeypatch):
    leave_out(monkeypatch, "quantize_products")
    _, path = exported(Causal(), torch.randn(2, 4, 16), tmp_path / "out")
    assert kinds(path)["Conv"] == 2


@pytest.mark.medium
def test_a_result_that_others_read_too_is_left_as_it_is(tmp_path):
    sim, path = exported(Seen(), x := torch.randn(2, 4, 16), tmp_path / "out")
    with torch.no_grad():
        expected = sim.model(x)
    for ours, theirs in zip(expected, run_onnx(path, x), strict=True):
        torch.testing.assert_close(ours, torch.from_numpy(theirs))
