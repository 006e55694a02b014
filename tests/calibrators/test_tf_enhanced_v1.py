"""Against a search that follows the published algorithm bin by bin, in float64."""

import math

import numpy as np
import pytest
import torch

from qtk.calibrators import tf_enhanced_v1
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


@pytest.mark.medium
def test_dropped_values_are_warned_of():
    scheme, spec = TfEnhanced(variant="v1"), next(iter(SPECS.values()))
    observer = scheme.observer(PerTensor())
    observer.observe(torch.linspace(-1, 1, 100))
    scheme.encodings([observer], [spec])
    observer.observe(torch.linspace(-10, 10, 100))
    with pytest.warns(UserWarning, match=r"3\d\.\d% of the values lie outside three times the range"):
        scheme.encodings([observer], [spec])


@pytest.mark.medium
@pytest.mark.sample(6)
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


@pytest.mark.medium
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


def test_a_histogram_worked_out_by_hand(by_hand):
    """Min -1, max 1, center 0: 512 bins over [-3, 3] of width 3/256, so that x is in bin round(256/3·x + 256).

    -1 → 170.67 → 171.  1 → 341.33 → 341.  267/512 → 300.5 → 301, away from zero.  10 → 1109, dropped.
    Batches weigh the same: bin 171 has (1/2 + 1/4)/2, bin 341 too, bin 301 (0 + 1/4)/2.
    """
    left, shares, _ = (value[0] for value in by_hand.shares())
    assert {int(i): float(shares[i]) for i in shares.nonzero()} == {171: 0.375, 301: 0.125, 341: 0.375}
    assert (float(left[0]), float(left[1])) == (-3.0, -3 + 3 / 256)
    assert [float(left[i]) for i in (171, 301, 341)] == [-0.99609375, 0.52734375, 0.99609375]


def test_symmetric_candidates_worked_out_by_hand(by_hand):
    """Two bits: N = 3, codes -2…1. The observed range is ±0.99609375, so candidates are k/100 · 0.99609375/1.5.

    Middles of the occupied bins: -0.990234375 (share 0.375), 0.533203125 (0.125), 1.001953125 (0.375).

    k = 101, the scale s is 0.670703125:
        the range ends at s, in bin floor((s + 3)·256/3) = floor(313.23), whose middle is 0.673828125
        -0.990234375 / s = -1.476 → code -1, off by 0.990234375 - 0.670703125 = 0.31953125
         0.533203125 / s =  0.795 → code  1, off by 0.670703125 - 0.533203125 = 0.1375
         1.001953125 is clipped, and off by 1.001953125 - 0.673828125 = 0.328125
        cost 0.375·0.31953125² + 0.125·0.1375² + 3·0.375·0.328125² = 0.161775
    k = 100, s is 0.6640625, its bin 312 with the middle 0.662109375:
        cost 0.375·0.326171875² + 0.125·0.130859375² + 3·0.375·0.33984375² = 0.171967
    k = 99: the first and last terms alone are 0.375·0.324609375² + 3·0.375·0.33984375² = 0.1694
    k = 94…98: clipping costs 3·0.375·0.3515625² = 0.1390 or more, and -0.99 is at least 0.2582 from -s and -2s: 0.0250
    k ≤ 93: clipping alone costs 0.1682 or more
    So k = 101 wins.
    """
    costs = [
        0.375 * 0.31953125**2 + 0.125 * 0.1375**2 + 3 * 0.375 * 0.328125**2,
        0.375 * 0.326171875**2 + 0.125 * 0.130859375**2 + 3 * 0.375 * 0.33984375**2,
    ]
    spec = QuantSpec(dtype("int2"), symmetric=True)
    left, shares, _ = by_hand.shares()
    scales = torch.tensor([[0.670703125], [0.6640625]], dtype=torch.float64)
    found = tf_enhanced_v1._cost(left, shares, scales, torch.full_like(scales, -2), spec, 3.0)
    assert found[:, 0].tolist() == pytest.approx(costs, rel=1e-12)
    encoding = TfEnhanced(variant="v1").encodings([by_hand], [spec])[0]
    assert float(encoding.scale) == pytest.approx(0.670703125, rel=1e-7)


def test_an_asymmetric_range_worked_out_by_hand(by_hand):
    """Two bits: N = 3. The observed range has scale 1.9921875/3 = 0.6640625 and starts at round(-1.5) = -2 scales.

    So it is [-1.328125, 0.6640625], and every candidate clips 1.001953125 to 0.662109375 at best. Scales of 17/16 that
    start at -2 reach beyond it on both sides and are skipped. Those of 16/16 that start there are this range:
        -0.990234375 → -0.6640625, 0.533203125 → 0.6640625: the cost of k = 100 above, 0.171967
    That no narrower range costs less is for the brute force above.
    """
    spec = QuantSpec(dtype("uint2"))
    encoding = TfEnhanced(variant="v1").encodings([by_hand], [spec])[0]
    assert float(encoding.scale) == 0.6640625
    assert int(encoding.zero_point) == 2


@pytest.fixture
def by_hand():
    observer = TfEnhanced(variant="v1").observer(PerTensor())
    observer.observe(torch.tensor([-1.0, 1.0]))
    observer.observe(torch.tensor([1.0, 267 / 512, 10.0, -1.0]))
    return observer
