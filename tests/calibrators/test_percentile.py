"""Against sorting."""

import math

import pytest
import torch

from qtk.calibrators.percentile import Percentile
from qtk.core.dtypes import dtype
from qtk.core.granularity import PerChannel, PerTensor
from qtk.core.spec import QuantSpec
from qtk.errors import CalibrationError
from qtk.numerics.ranges import choose_range
from tests.calibrators.data import DATA, data, histogram

SPEC = QuantSpec(dtype("uint8"))
QUANTILES = (0.6, 0.99, 0.999, 0.9999, 1.0)


def ends(x, quantile):
    """The values that the definition names."""
    ordered = sorted(x.double().tolist())
    rank = math.ceil(quantile * len(ordered))
    return ordered[len(ordered) - rank], ordered[rank - 1]


def expected(low, high, spec=SPEC):
    return choose_range(torch.tensor([low], dtype=torch.float64), torch.tensor([high], dtype=torch.float64), spec)


@pytest.mark.parametrize("quantile", QUANTILES)
@pytest.mark.parametrize("name", DATA)
def test_weights(name, quantile):
    x = data(name)
    scheme = Percentile(quantile=quantile)
    observer = scheme.observer(PerTensor(), static=True)
    observer.observe(x)
    encoding = scheme.encodings([observer], [SPEC])[0]
    scale, zero_point = expected(*ends(x, quantile))
    assert torch.equal(encoding.scale, scale)
    assert torch.equal(encoding.zero_point, zero_point)


@pytest.mark.parametrize("quantile", QUANTILES)
@pytest.mark.parametrize("name", DATA)
def test_activations_to_the_edge_of_the_bin(name, quantile):
    x = data(name)
    scheme = Percentile(quantile=quantile)
    observer = scheme.observer(PerTensor())
    for batch in x.split(333):
        observer.observe(batch)
    low, high = ends(x, quantile)
    middles, _, reach = histogram(x, scheme.bins)
    width = 2 * reach
    low = max(math.floor(low / width) * width, float(x.min()))
    high = min((math.floor(high / width) + 1) * width, float(x.max()))
    encoding = scheme.encodings([observer], [SPEC])[0]
    scale, zero_point = expected(low, high)
    torch.testing.assert_close(encoding.scale, scale, rtol=1e-6, atol=0)
    assert torch.equal(encoding.zero_point, zero_point)
    assert middles[0] >= float(x.min())


def test_channels_and_mask_sentinels():
    x = torch.stack([data("random"), data("skewed")])
    x[0, :100] = -torch.inf
    scheme = Percentile(quantile=0.9)
    observer = scheme.observer(PerChannel(0), static=True)
    observer.observe(x)
    spec = QuantSpec(dtype("int8"), PerChannel(0), symmetric=True)
    encoding = scheme.encodings([observer], [spec])[0]
    for channel, row in enumerate((x[0, 100:], x[1])):
        assert float(encoding.scale[channel]) == float(expected(*ends(row, 0.9), spec)[0])


@pytest.mark.parametrize("quantile", [0.5, 1.1, float("nan"), 99.9])
def test_settings_that_make_no_sense_are_refused(quantile):
    with pytest.raises(CalibrationError, match=r"more than 0\.5"):
        Percentile(quantile=quantile)


def test_the_end_is_the_edge_of_the_bin_even_of_the_first_one():
    x = torch.cat([torch.full((99,), 0.9), torch.tensor([1000.0])])
    scheme = Percentile(quantile=0.9, bins=1000)
    observer = scheme.observer(PerTensor())
    observer.observe(x)
    assert float(scheme.encodings([observer], [SPEC])[0].maximum) == pytest.approx(1.0)
