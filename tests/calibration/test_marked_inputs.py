"""Inputs with markers for missing values, which the model replaces, against the float model on unseen data."""

import math
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
    "in place": lambda x: (y := x.clone()).index_put_((y == MARKER,), torch.tensor(0.0)),
    "scaled first": lambda x: torch.where(x == MARKER, 0.0, (x - 0.1) / 1.1),
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
    """Steps of the input, and of what is computed before the replacement, are 0.15 each: 27 dB of the others."""
    sim, said = calibrated(CLEANED[cleaned], [rows(seed, MARKER) for seed in range(3)], config)
    assert sim.encodings()["x:input"].spec.dtype.bits == 16
    steps = sum(encoding.spec.dtype.bits == 16 for encoding in sim.encodings().values())
    assert sqnr_db(CLEANED[cleaned], sim, rows(9, MARKER)) > 24 - 10 * math.log10(steps)
    assert not said


@pytest.mark.parametrize(
    "changed", [lambda x: (x - 0.1) / 1.1, lambda x: x + torch.linspace(0, 1, 16), lambda x: x],
    ids=["scaled", "added to", "as it is"],
)
def test_a_marker_that_a_layer_reads_stays_data(changed):
    sim, said = calibrated(changed, [rows(seed, MARKER) for seed in range(3)], "onnxruntime")
    assert sim.encodings()["x:input"].spec.dtype.bits == 8
    assert not said


def test_a_module_of_the_name_of_the_input_keeps_its_bits():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.fc, self.head = nn.Linear(16, 32), nn.Linear(32, 4)

        def forward(self, fc):
            return self.head(self.fc(torch.where(fc == MARKER, 0.0, fc)).relu())

    sim = qtk.QuantSim(Named().eval(), rows(0))
    sim.compute_encodings([rows(seed, MARKER) for seed in range(3)], progress=False)
    bits = {name: encoding.spec.dtype.bits for name, encoding in sim.encodings().items()}
    assert (bits["fc:input"], bits["relu:out"]) == (16, 8)


def test_a_marker_behind_a_concatenation_of_inputs():
    class Joined(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(32, 8)

        def forward(self, a, b):
            return self.linear(torch.cat([a, b], 1).clamp(-6, 6))

    sim = qtk.QuantSim(Joined().eval(), (rows(0), rows(0)), config="onnxruntime")
    sim.compute_encodings([(rows(seed, MARKER), rows(seed + 20)) for seed in range(3)], progress=False)
    encodings = sim.encodings()
    assert {"a:input", "concat:out"}.isdisjoint(encodings)
    assert encodings["b:input"].maximum.item() < 6


def test_many_merges_of_one_value_take_no_time():
    def merged(x):
        x = torch.where(x < -999, torch.zeros_like(x), x)
        for _ in range(40):
            x = torch.where(x > 5.0, x.roll(1, 1), x)
        return x

    sim, _ = calibrated(merged, [rows(seed, MARKER) for seed in range(3)])
    assert sim.encodings()["x:input"].spec.dtype.bits == 16


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


def test_a_marker_is_named_where_data_run_once():
    _, said = calibrated(CLEANED["clamp"], iter([rows(seed, MARKER) for seed in range(3)]))
    assert "-9999, 5% of its values, takes the range: of the others 8 bits leave" in said
    assert "{match: {path: 'x'}, output: {bits: 16}}" in said
