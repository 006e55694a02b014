"""Against a search over the elements themselves, candidate by candidate."""

import numpy as np
import pytest
import torch

from qtk.calibrators.activation_mse import ActivationMse
from qtk.calibrators.mse import Mse
from qtk.core.dtypes import dtype
from qtk.core.granularity import PerChannel, PerTensor
from qtk.core.spec import QuantSpec
from qtk.errors import CalibrationError
from qtk.numerics.ranges import choose_range
from tests.calibrators.data import DATA, data

SPECS = {name: QuantSpec(dtype(name), symmetric=name.startswith("i")) for name in ("uint8", "int8", "uint4", "int4")}
STEPS = 20


def weighted(x, weights, steps=STEPS):
    scheme = ActivationMse(steps=steps, bins=1024)
    observer = scheme.observer(PerTensor())
    observer.observe(x)
    observer.weigh(x, weights.sqrt())
    return scheme, observer


def error(samples, scale, zero_point, spec):
    """Of the middles of bins, in float64."""
    values, counts = samples.values[0].numpy(), samples.counts[0].numpy()
    scale, zero_point = float(scale), 0 if zero_point is None else int(zero_point)
    code = np.clip(np.round(values / scale) + zero_point, spec.qmin, spec.qmax)
    return float(((values - (code - zero_point) * scale) ** 2 * counts).sum())


def least(samples, spec, lows, highs):
    """The pair of ends of least error."""
    best, ends = np.inf, None
    for low, high in zip(lows, highs, strict=True):
        bounds = torch.tensor([low, high], dtype=torch.float64)
        scale, zero_point = choose_range(bounds[:1], bounds[1:], spec)
        found = error(samples, scale, zero_point, spec)
        if found < best * (1 - 1e-12):
            best, ends = found, (low, high)
    return ends


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("name", [name for name in DATA if name != "zero"])
def test_both_ends_are_searched_together_then_each_by_itself(name, spec):
    x = data(name)
    weights = (x - x.mean()).abs()
    scheme, observer = weighted(x, weights)
    samples = observer.samples()
    fractions = np.arange(1, STEPS + 1) / STEPS
    lows, highs = min(float(x.min()), 0) * fractions, max(float(x.max()), 0) * fractions
    low, high = least(samples, spec, lows, highs)
    for _ in range(0 if spec.symmetric else 2):
        low, high = least(samples, spec, lows, np.full(STEPS, high))
        low, high = least(samples, spec, np.full(STEPS, low), highs)
    bounds = torch.tensor([low, high], dtype=torch.float64)
    scale, zero_point = choose_range(bounds[:1], bounds[1:], spec)
    (encoding,) = scheme.encodings([observer], [spec])
    assert error(samples, encoding.scale, encoding.zero_point, spec) == pytest.approx(
        error(samples, scale, zero_point, spec), rel=1e-12
    )


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("name", [name for name in DATA if name != "zero"])
def test_the_weighted_error_is_never_above_that_of_mse(name, spec):
    x = data(name)
    scheme, observer = weighted(x, x.square(), steps=100)
    plain = Mse(steps=100).observer(PerTensor())
    plain.observe(x)
    (own,), (other,) = scheme.encodings([observer], [spec]), Mse(steps=100).encodings([plain], [spec])
    samples = observer.samples()
    assert error(samples, own.scale, own.zero_point, spec) <= error(samples, other.scale, other.zero_point, spec) * (
        1 + 1e-9)


def test_what_nothing_depends_on_is_clipped():
    x = torch.cat([torch.linspace(-1, 1, 2000), torch.full((10,), 6.0)])
    spec = SPECS["uint4"]
    matters = torch.ones_like(x)
    scheme, observer = weighted(x, matters, steps=100)
    assert float(scheme.encodings([observer], [spec])[0].maximum) > 5
    matters[2000:] = 0
    scheme, observer = weighted(x, matters, steps=100)
    assert float(scheme.encodings([observer], [spec])[0].maximum) < 2


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_weights_are_searched_on_their_elements(spec):
    x = torch.stack([data(name)[:500] for name in DATA if name != "zero"])
    spec = QuantSpec(spec.dtype, PerChannel(0), symmetric=spec.symmetric)
    scheme = ActivationMse(steps=100)
    observer, plain = (each.observer(spec.granularity, static=True) for each in (scheme, Mse()))
    observer.observe(x)
    plain.observe(x)
    (own,), (other,) = scheme.encodings([observer], [spec]), Mse().encodings([plain], [spec])
    if spec.symmetric:
        assert own.equals(other)

    def errors(encoding):
        zero = 0 if encoding.zero_point is None else encoding.zero_point.double()[:, None]
        scale = encoding.scale.double()[:, None]
        code = ((x.double() / scale).round() + zero).clamp(spec.qmin, spec.qmax)
        return (x.double() - (code - zero) * scale).square().sum(1)

    assert bool((errors(own) <= errors(other) * (1 + 1e-6)).all())


def test_settings_out_of_range_are_errors():
    for steps in (0, 1001):
        with pytest.raises(CalibrationError, match="steps of activation_mse"):
            ActivationMse(steps=steps)
    with pytest.raises(CalibrationError, match="bins must be"):
        ActivationMse(bins=1).observer(PerTensor())
