"""Inputs with markers for missing values, which the model replaces, against the float model on unseen data."""

import warnings

import pytest
import torch
from torch import nn

import qtk

MARKER = -9999.0
CLEANED = {
    "where": lambda x: torch.where(x == MARKER, 0.0, x),
    "where of a threshold": lambda x: torch.where(x < -999, torch.zeros_like(x), x),
    "masked_fill": lambda x: x.masked_fill(x <= MARKER, 0.5),
    "clamp": lambda x: x.clamp(min=-6.0),
    "ReLU": lambda x: x.relu(),
    "product with a mask": lambda x: x * (x > -999),
    "tanh": lambda x: x.tanh(),
    "moved": lambda x: (y := x.reshape(-1, 4, 4).transpose(1, 2)).masked_fill(y == MARKER, 0.0).flatten(1),
    "joined": lambda x: torch.cat([x.masked_fill(x == MARKER, 0.0)[:, :8], (x == MARKER)[:, :8].to(x.dtype)], 1),
}


class Net(nn.Module):
    def __init__(self, cleaned):
        super().__init__()
        torch.manual_seed(0)
        self.cleaned = cleaned
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x):
        return self.net(self.cleaned(x))


def rows(seed, *markers, share=0.05):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(64, 16, generator=generator)
    for marker in markers:
        x[torch.rand(64, 16, generator=generator) < share] = marker
    return x


def calibrated(cleaned, batches, config="default"):
    sim = qtk.QuantSim(Net(cleaned).eval(), rows(0), config=config)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        sim.compute_encodings(batches, progress=False)
    return sim, " ".join(str(each.message) for each in said)


def sqnr_db(cleaned, sim, x):
    with torch.no_grad():
        expected = Net(cleaned).double()(x.double())
    return float(10 * (expected.square().sum() / (expected - sim.model(x).detach()).square().sum()).log10())


@pytest.mark.parametrize("cleaned", CLEANED)
def test_the_others_are_quantized_as_if_there_were_no_markers(cleaned):
    clean, batches = CLEANED[cleaned], [rows(seed, MARKER) for seed in range(3)]
    sim, said = calibrated(clean, batches, "onnxruntime")
    other, _ = calibrated(lambda x: x, [clean(batch) for batch in batches], "onnxruntime")
    assert sqnr_db(clean, sim, rows(9, MARKER)) > sqnr_db(lambda x: x, other, clean(rows(9, MARKER))) - 1
    assert not said


@pytest.mark.parametrize("cleaned", CLEANED)
@pytest.mark.parametrize("config", ["default", "qnn_htp"])
def test_targets_without_float_get_16_bits(cleaned, config):
    """Steps of the input are 0.15: 27 dB of the others."""
    sim, said = calibrated(CLEANED[cleaned], [rows(seed, MARKER) for seed in range(3)], config)
    assert sim.encodings()["x:input"].spec.dtype.bits == 16
    assert sqnr_db(CLEANED[cleaned], sim, rows(9, MARKER)) > 24
    assert not said


def test_several_markers():
    clean, markers = lambda x: x.clamp(-6, 6), (MARKER, -8888.0, 1e6)
    sim, _ = calibrated(clean, [rows(seed, *markers) for seed in range(3)], "onnxruntime")
    assert "x:input" not in sim.encodings()


def test_layers_behind_have_integer_inputs():
    sim, _ = calibrated(CLEANED["where"], [rows(seed, MARKER) for seed in range(3)], "onnxruntime")
    encodings = sim.encodings()
    assert "x:input" not in encodings
    assert encodings["net.0:in[0]"].maximum.item() < 6


@pytest.mark.parametrize(
    ("cleaned", "batches"),
    [
        (lambda x: x, [rows(seed) for seed in range(3)]),
        (lambda x: x.clamp(-1, 1), [rows(seed).clamp(-2, 2) for seed in range(3)]),
        (lambda x: x.clamp(-1, 1), [rows(0), rows(1).index_fill_(0, torch.tensor([3]), 4.0)]),
        (lambda x: x.clamp(-1, 1), [torch.zeros(64, 16), torch.full((64, 16), 2.0)]),
    ],
    ids=["none", "saturated", "a bit larger", "two values"],
)
def test_ranges_of_other_inputs_stay(cleaned, batches):
    sim, _ = calibrated(cleaned, batches, "onnxruntime")
    assert sim.encodings()["x:input"].spec.dtype.bits == 8


def test_a_marker_that_a_layer_reads_is_named_and_stays():
    sim, said = calibrated(lambda x: x, [rows(seed, MARKER) for seed in range(3)])
    assert "-9999, 5% of its values, takes the range: of the others 8 bits leave" in said
    assert "x:input" in sim.encodings()


def test_a_marker_is_named_where_data_run_once():
    _, said = calibrated(CLEANED["clamp"], iter([rows(seed, MARKER) for seed in range(3)]))
    assert "-9999" in said
    assert "{match: {path: 'x'}, output: {bits: 16}}" in said
