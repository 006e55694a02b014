"""Against a search that follows the published algorithm bin by bin, in float64."""

import math

import numpy as np
import pytest
import torch

from qtk.calibrators.tf_enhanced import TfEnhanced
from qtk.core.dtypes import dtype
from qtk.core.granularity import PerChannel, PerTensor
from qtk.core.spec import QuantSpec
from qtk.observers.first_batch_histogram import BINS
from tests.calibrators.data import DATA, data

SPECS = {name: QuantSpec(dtype(name), symmetric=name.startswith("i")) for name in ("uint8", "int8", "uint4")}


def away(value):
    return math.copysign(math.floor(abs(value) + 0.5), value)


def grid(low, high, spec):
    steps = spec.qmax - spec.qmin
    if spec.symmetric:
        for k in range(1, 102):
            yield max(abs(low), abs(high)) / (steps / 2) * k / 100, spec.qmin
        return
    widest = (high - low) / steps
    start = away(low / widest)
    lowest, highest = widest * start, widest * start + widest * steps
    for k in range(1, 18):
        for i in range(21):
            first = widest * (k / 16) * int(-steps + steps / 20 * i)
            last = first + widest * (k / 16) * steps
            if first < lowest and last > highest:
                continue
            first, last = max(first, lowest), min(last, highest)
            if last > first:
                scale = (last - first) / steps
                yield scale, away(first / scale)
    yield widest, start


def cost(left, shares, scale, start, spec, gamma=3.0):
    steps, width = spec.qmax - spec.qmin, left[1] - left[0]
    ends = [min(max(math.floor((scale * (start + far) - left[0]) / width), 0), BINS - 1) for far in (0, steps)]
    middle = left + width / 2
    total = 0.0
    for i in np.nonzero(shares)[0]:
        if i < ends[0]:
            total += gamma * shares[i] * (middle[i] - middle[ends[0]]) ** 2
        elif i >= ends[1]:
            total += gamma * shares[i] * (middle[i] - middle[ends[1]]) ** 2
        else:
            code = away(middle[i] / scale - start) + start
            total += shares[i] * (middle[i] - code * scale) ** 2
    return total


def brute_force(left, shares, spec):
    occupied = np.nonzero(shares)[0]
    low, high = min(left[occupied[0]], 0.0), max(left[occupied[-1]], 0.0)
    high = max(high, low + 0.01)
    best, chosen = math.inf, None
    for scale, start in grid(low, high, spec):
        found = cost(left, shares, scale, start, spec)
        if found < best * (1 - 1e-12):
            best, chosen = found, (scale, start)
    return chosen


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("name", [name for name in DATA if name not in ("zero", "constant", "tiny", "huge")])
def test_as_published(name, spec):
    scheme = TfEnhanced(variant="v1")
    observer = scheme.observer(PerTensor())
    for batch in data(name)[:1000].split(300):
        observer.observe(batch)
    left, shares, _ = (value[0].numpy() for value in observer.shares())
    scale, start = brute_force(left, shares, spec)
    encoding = scheme.encodings([observer], [spec])[0]
    assert float(encoding.scale) == pytest.approx(scale, rel=1e-6)
    if not spec.symmetric:
        assert int(encoding.zero_point) == spec.qmin - start


def test_channels_are_searched_each_for_itself():
    x = torch.stack([data(name)[:300] for name in ("random", "skewed", "one_sided")])
    scheme = TfEnhanced(variant="v1")
    together = scheme.observer(PerChannel(0))
    together.observe(x)
    spec = QuantSpec(dtype("uint4"), PerChannel(0))
    encoding = scheme.encodings([together], [spec])[0]
    for channel, row in enumerate(x):
        alone = scheme.observer(PerTensor())
        alone.observe(row)
        own = scheme.encodings([alone], [SPECS["uint4"]])[0]
        assert float(own.scale) == float(encoding.scale[channel])
        assert int(own.zero_point) == int(encoding.zero_point[channel])


def test_only_zeros_give_the_range_of_one():
    scheme = TfEnhanced(variant="v1")
    observer = scheme.observer(PerTensor())
    observer.observe(torch.zeros(9))
    encoding = scheme.encodings([observer], [SPECS["int8"]])[0]
    assert float(encoding.scale) == pytest.approx(1 / 127)


@pytest.mark.parametrize("name", ["uint8", "int8"])
def test_channels_that_are_constant_or_zero(name):
    x = torch.cat([torch.zeros(1, 50), torch.full((1, 50), 5.0), torch.randn(1, 50), torch.full((1, 50), 0.01)])
    scheme = TfEnhanced(variant="v1")
    observer = scheme.observer(PerChannel(0), static=True)
    observer.observe(x)
    spec = QuantSpec(dtype(name), PerChannel(0), symmetric=name == "int8")
    encoding = scheme.encodings([observer], [spec])[0]
    assert bool(torch.isfinite(encoding.scale).all())
    for row, low, high in zip(x, encoding.minimum, encoding.maximum, strict=True):
        assert float(low) - 0.1 <= float(row.min())
        assert float(row.max()) <= float(high) + 0.5
