import pytest
import torch
from torch import nn

import qtk
from qtk.calibration import calibrate
from qtk.calibration.calibrate import bounded, known_encoding
from qtk.calibrators.scheme import calibrator
from qtk.errors import CalibrationError


@pytest.mark.parametrize(
    ("name", "symmetric", "bounds", "low", "high"),
    [
        ("uint8", False, (0.0, 1.0), 0.0, 1.0),
        ("uint16", False, (0.0, 1.0), 0.0, 1.0),
        ("int8", True, (-1.0, 1.0), -128 / 127, 1.0),
    ],
)
def test_known_ranges_become_the_encoding_that_just_holds_them(name, symmetric, bounds, low, high):
    spec = qtk.QuantSpec(qtk.dtype(name), symmetric=symmetric)
    encoding = known_encoding(spec, bounds)
    assert float(encoding.minimum) == pytest.approx(low, rel=1e-6)
    assert float(encoding.maximum) == pytest.approx(high, rel=1e-6)


@pytest.mark.parametrize(("beyond", "is_kept"), [(0.4, True), (0.7, False)])
def test_a_range_may_exceed_its_bounds_by_half_a_scale(beyond, is_kept):
    spec = qtk.QuantSpec(qtk.dtype("uint8"), symmetric=False)
    encoding = qtk.Encoding(spec, torch.tensor([0.5]), torch.tensor([2], dtype=torch.int32))  # −1 to 126.5
    within = bounded(encoding, (-1 + 0.5 * beyond, 126.5 - 0.5 * beyond))
    assert (within is encoding) == is_kept
    if not is_kept:
        assert -0.65 - 0.25 <= float(within.minimum) <= 0
        assert float(within.maximum) <= 126.15 + 0.25


def test_fixed_ranges_need_no_data_and_ignore_it():
    net = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1)).eval()
    rule = {"match": {"op": "softmax"}, "output": {"range": [0.0, 1.0]}}
    sim = qtk.QuantSim(net, torch.randn(2, 4), config={"version": 1, "rules": [rule]})
    sim.compute_encodings([torch.zeros(2, 4)], progress=False)
    assert float(sim.encodings()["1:out"].maximum) == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize(("peak", "expected"), [(0.6, 1.0), (0.4, 0.4)])  # shares 0.3 and 0.2 of [-1, 1]
def test_a_fixed_range_is_calibrated_where_data_fill_less_than_a_quarter_of_it(peak, expected):
    sim = qtk.QuantSim(nn.Tanh(), torch.zeros(2, 2))
    sim.compute_encodings([torch.tensor([[0.0, peak]]).atanh()], progress=False)
    assert float(sim.encodings()["tanh:out"].maximum) == pytest.approx(expected, rel=0.01)


def test_a_soft_cap_that_is_never_near_its_limit_keeps_its_bits():
    class Cap(nn.Module):
        def forward(self, x):
            return 50 * torch.tanh(x / 50)

    x = torch.linspace(-1.5, 1.5, 1001)[None]  # 3 % of [-1, 1]
    sim = qtk.QuantSim(Cap(), x)
    sim.compute_encodings([x], progress=False)
    expected = 50 * torch.tanh(x.double() / 50)
    error = (sim.model(x) - expected).square().sum() / expected.square().sum()
    assert -10 * error.log10() > 40  # 14 dB with codes of [-1, 1]


def test_without_data_a_fixed_range_is_taken_whatever_data_would_fill():
    rule = {"match": {"op": "tanh"}, "output": {"bits": 8, "range": [-1.0, 1.0], "min_fill": 0.25}}
    config = {"version": 1, "defaults": {"activation": "float"}, "rules": [rule]}
    sim = qtk.QuantSim(nn.Sequential(nn.Linear(4, 4), nn.Tanh()).eval(), torch.zeros(2, 4), config=config)
    sim.compute_encodings(None)
    assert float(sim.encodings()["1:out"].maximum) == pytest.approx(1.0, rel=0.01)


def test_shared_sites_observe_everything_they_share():
    class Net(nn.Module):
        def forward(self, x, y):
            return torch.cat([x, y], 1)

    x, y = torch.linspace(-1, 3, 8).reshape(2, 4), torch.linspace(-5, 2, 8).reshape(2, 4)
    rule = {"match": {"op": "concat"}, "output": {"bits": 8}}
    sim = qtk.QuantSim(Net(), (x, y), config={"version": 1, "rules": [rule]})
    sim.compute_encodings([(x, y)], progress=False)
    encodings = sim.encodings()
    assert encodings["x:input"].equals(encodings["concat:out"])
    assert float(encodings["y:input"].minimum) == pytest.approx(-5, abs=8 / 255)
    assert float(encodings["y:input"].maximum) == pytest.approx(3, abs=8 / 255)


def test_activations_are_observed_in_float_not_behind_other_quantizers():
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).eval()
    x = torch.randn(64, 8)
    sim = qtk.QuantSim(net, x, weight_bits=2, activation_bits=8)
    sim.compute_encodings([x], progress=False)
    with torch.no_grad():
        expected = net(x)
    encoding = sim.encodings()["1:out"]
    assert float(encoding.maximum) == pytest.approx(float(expected.max()), abs=float(encoding.scale))


def test_broken_weights_name_their_site():
    net = nn.Sequential(nn.Linear(4, 4)).eval()
    with torch.no_grad():
        net[0].weight[1, 2] = float("nan")
    sim = qtk.QuantSim(net, torch.randn(2, 4))
    with pytest.raises(CalibrationError, match=r"0\.weight: .*NaN"):
        sim.compute_encodings([torch.randn(2, 4)], progress=False)


def test_sites_that_no_data_reached_are_named():
    class Ragged(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x):
            return self.a(x)

    sim = qtk.QuantSim(Ragged().eval(), torch.randn(2, 4))
    with pytest.raises(CalibrationError, match=r"no data reached 2 sites: x:input, a:out"):
        sim.compute_encodings(lambda model: None, progress=False)


@pytest.mark.parametrize(("at_once", "together"), [(0, [1, 1, 1, 1, 0]), (128, [3, 1]), (1 << 22, [4])])
def test_ranges_of_a_few_parameters_are_searched_together(at_once, together, monkeypatch):
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    sim = qtk.QuantSim(net, torch.randn(2, 8), scheme="mse", activation_bits=None)
    searched, search = [], calibrate._encodings_of_observed
    monkeypatch.setattr(calibrate, "AT_ONCE_ON_CPU", at_once)
    monkeypatch.setattr(calibrate, "_encodings_of_observed", lambda *given: searched.append(len(given[0])) or search(
        *given))
    sim.compute_encodings(None, progress=False)
    assert searched[: len(together)] == together
    found = sim.encodings()["3.weight"]
    own = calibrator("mse").observer(found.spec.granularity, static=True)
    own.observe(net[3].weight)
    assert calibrator("mse").encodings([own], [found.spec])[0].equals(found)
