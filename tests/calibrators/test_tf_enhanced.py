"""Against a search that forms every candidate one by one, in float64, from its definition."""

import itertools

import numpy as np
import pytest
import torch

from qtk.calibrators.tf_enhanced import TfEnhanced
from qtk.core.dtypes import dtype
from qtk.core.granularity import PerBlock, PerChannel, PerTensor
from qtk.core.spec import QuantSpec
from qtk.errors import ArgumentError, CalibrationError
from tests.calibrators.data import COUNT, DATA, data, histogram

SPECS = {name: QuantSpec(dtype(name), symmetric=name.startswith("i")) for name in ("uint8", "int8", "uint4", "int4")}


def grid(low, high, spec):
    """Scale and zero point of every candidate, in order."""
    steps = spec.qmax - spec.qmin
    least = min(2.0**-23, 0.01 / steps)
    low, high = min(low, 0.0), max(high, least * steps)
    if spec.symmetric:
        for k in range(1, 102):
            yield np.float32(max(2 * max(high, -low) / steps * (k / 100), least)), 0
        return
    widest = (high - low) / steps
    start = np.round(low / widest)
    lowest, highest = widest * start, widest * start + widest * steps
    places = min(20, int(steps) + 1)
    for k in range(1, 18):
        delta = widest * (k / 16)
        for place in [*(np.round(-steps + steps * i / (places - 1)) for i in range(places)), start]:
            first = min(max(delta * place, lowest), highest)
            last = min(max(delta * place + delta * steps, lowest), highest)
            scale = max((last - first) / steps, least)
            zero = min(max(spec.qmin - np.round(first / scale), spec.qmin), spec.qmax)
            yield np.float32(scale), int(zero)


def brute_force(middles, counts, low, high, spec, gamma=3.0):
    best, chosen = np.inf, None
    for scale, zero in grid(low, high, spec):
        code = np.round(middles / np.float64(scale)) + zero
        nearest = np.clip(code, spec.qmin, spec.qmax)
        error = (middles - (nearest - zero) * np.float64(scale)) ** 2 * np.where(code == nearest, 1.0, gamma)
        noise = float((error * counts).sum())
        if noise < best * (1 - 1e-12):  # sums of another order
            best, chosen = noise, (scale, zero)
    return chosen


def of_rows(encoding):
    zeros = itertools.repeat(0) if encoding.zero_point is None else encoding.zero_point.reshape(-1).tolist()
    return list(zip(map(np.float32, encoding.scale.reshape(-1).tolist()), zeros, strict=False))


@pytest.mark.medium
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("name", [name for name in DATA if name != "zero"])
def test_activations(name, spec):
    x = data(name)
    scheme = TfEnhanced()
    observer = scheme.observer(PerTensor())
    observer.observe(x)
    middles, counts, _ = histogram(x, scheme.bins)
    expected = brute_force(middles, counts, float(x.min()), float(x.max()), spec)
    assert of_rows(scheme.encodings([observer], [spec])[0]) == [expected]


@pytest.mark.sample(2)
@pytest.mark.medium
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("granularity", [PerChannel(1), PerBlock((20, 1))], ids=str)
def test_weights_of_every_kind_at_once(granularity, spec):
    names = [name for name in DATA if name not in ("zero", "tiny", "huge")]
    x = torch.stack([data(name)[:400] for name in names], dim=1)  # [400, channels]
    spec = QuantSpec(spec.dtype, granularity, symmetric=spec.symmetric)
    scheme = TfEnhanced(gamma=2.0)
    observer = scheme.observer(granularity, static=True)
    observer.observe(x)
    rows = x.t() if isinstance(granularity, PerChannel) else x.reshape(20, 20, -1).transpose(1, 2).reshape(-1, 20)
    expected = [
        brute_force(row.double().numpy(), 1.0, float(row.min()), float(row.max()), spec, gamma=2.0) for row in rows
    ]
    encoding = scheme.encodings([observer], [spec])[0]
    assert encoding.scale.shape == granularity.qparam_shape(tuple(x.shape))
    assert of_rows(encoding) == expected


def test_a_value_that_is_always_zero_is_exact():
    scheme = TfEnhanced()
    observer = scheme.observer(PerTensor())
    observer.observe(torch.zeros(COUNT))
    encoding = scheme.encodings([observer], [SPECS["uint8"]])[0]
    assert (float(encoding.scale), int(encoding.zero_point)) == (1.0, 0)


def test_clipping_may_cost_more_or_less():
    x = data("outlier")
    found = []
    for gamma in (0.01, 0.3, 1000.0):
        scheme = TfEnhanced(gamma=gamma)
        observer = scheme.observer(PerTensor())
        observer.observe(x)
        found.append(float(scheme.encodings([observer], [SPECS["int4"]])[0].scale))
    assert found[0] < found[1] < found[2]


def test_a_batch_far_out_widens_the_range_only_so_far():
    first, second = data("random"), torch.full((10,), 1e6)
    reach = float(first.max()) + 1.5 * float(first.max() - first.min())
    for growth, bound in ((3.0, reach), (None, 1e6)):
        scheme = TfEnhanced(growth=growth)
        observer = scheme.observer(PerTensor())
        observer.observe(first)
        observer.observe(second)
        assert float(observer.maximum) == pytest.approx(bound)
        assert int(observer.counts.sum()) == COUNT + 10


def test_the_order_of_growing_data_does_not_decide_what_is_clipped():
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(4096, generator=generator) * factor for factor in (1, 10, 100, 500)]
    found = []
    for order in (batches, batches[::-1]):
        scheme = TfEnhanced()
        observer = scheme.observer(PerTensor())
        for batch in order:
            observer.observe(batch)
        found.append(scheme.encodings([observer], [SPECS["uint8"]])[0])
    assert found[0].equals(found[1])
    assert float(found[0].maximum) > 0.5 * max(float(batch.max()) for batch in batches)


def test_sites_searched_together_get_what_each_gets_alone():
    scheme = TfEnhanced()
    observers, specs = [], []
    for name, spec in itertools.product(DATA, SPECS.values()):
        observers.append(scheme.observer(PerTensor()))
        observers[-1].observe(data(name))
        specs.append(spec)
    together = scheme.encodings(observers, specs)
    for own, observer, spec in zip(together, observers, specs, strict=True):
        assert own.equals(scheme.encodings([observer], [spec])[0])


@pytest.mark.parametrize("settings", [{"variant": "v3"}, {"gamma": 0.0}, {"variant": "v1", "bins": 100}])
def test_settings_that_make_no_sense_are_refused(settings):
    with pytest.raises((CalibrationError, ArgumentError)):
        TfEnhanced(**settings)


def test_nothing_seen_is_an_error():
    scheme = TfEnhanced()
    with pytest.raises(CalibrationError, match="no data was observed"):
        scheme.encodings([scheme.observer(PerTensor())], [SPECS["int8"]])
