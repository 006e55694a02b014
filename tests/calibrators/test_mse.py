"""Against a search over the elements themselves, candidate by candidate."""

import numpy as np
import pytest
import torch

from qtk.calibrators.mse import Mse
from qtk.core.dtypes import dtype
from qtk.core.granularity import PerChannel, PerTensor
from qtk.core.spec import QuantSpec
from qtk.errors import CalibrationError
from qtk.numerics.ranges import choose_range
from tests.calibrators.data import DATA, data, histogram

SPECS = {name: QuantSpec(dtype(name), symmetric=name.startswith("i")) for name in ("uint8", "int8", "uint4", "int4")}


def brute_force(values, counts, low, high, spec, norm, steps):
    best, chosen = np.inf, None
    for i in range(1, steps + 1):
        bounds = torch.tensor([low * (i / steps), high * (i / steps)], dtype=torch.float64)
        scale, zero = choose_range(bounds[:1], bounds[1:], spec)
        scale, zero = float(scale), 0 if zero is None else int(zero)
        code = np.clip(np.round(values / scale) + zero, spec.qmin, spec.qmax)
        error = float((np.abs(values - (code - zero) * scale) ** norm * counts).sum())
        if error < best * (1 - 1e-12):
            best, chosen = error, (scale, zero)
    return chosen


def found(encoding, row=0):
    return float(encoding.scale[row]), 0 if encoding.zero_point is None else int(encoding.zero_point[row])


@pytest.mark.sample(68)
@pytest.mark.parametrize("norm", [1.0, 2.0, 2.4])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("name", [name for name in DATA if name != "zero"])
def test_activations(name, spec, norm):
    x = data(name)
    scheme = Mse(norm=norm, steps=40, bins=256)
    observer = scheme.observer(PerTensor())
    observer.observe(x)
    middles, counts, _ = histogram(x, 256)
    expected = brute_force(middles, counts, float(x.min()), float(x.max()), spec, norm, 40)
    assert found(scheme.encodings([observer], [spec])[0]) == expected


@pytest.mark.sample(2)
@pytest.mark.medium
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_weights(spec):
    x = torch.stack([data(name)[:500] for name in DATA if name != "zero"])
    spec = QuantSpec(spec.dtype, PerChannel(0), symmetric=spec.symmetric)
    scheme = Mse()
    observer = scheme.observer(spec.granularity, static=True)
    observer.observe(x)
    encoding = scheme.encodings([observer], [spec])[0]
    for channel, row in enumerate(x):
        expected = brute_force(row.double().numpy(), 1, float(row.min()), float(row.max()), spec, 2, 100)
        assert found(encoding, channel) == expected


def test_never_worse_than_min_max():
    x = data("random")
    spec = SPECS["int4"]
    scheme = Mse()
    observer = scheme.observer(PerTensor(), static=True)
    observer.observe(x)
    encoding = scheme.encodings([observer], [spec])[0]
    widest = Mse(steps=1).encodings([observer], [spec])[0]
    errors = [
        float((torch.fake_quantize_per_tensor_affine(x, float(e.scale), 0, -8, 7) - x).square().sum())
        for e in (encoding, widest)
    ]
    assert errors[0] < errors[1]


@pytest.mark.parametrize("settings", [{"norm": 0.0}, {"steps": 0}, {"norm": float("nan")}])
def test_settings_that_make_no_sense_are_refused(settings):
    with pytest.raises(CalibrationError):
        Mse(**settings)
