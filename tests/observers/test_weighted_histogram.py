"""Against sums over the elements themselves."""

import copy

import numpy as np
import pytest
import torch

from qtk.core.granularity import PerChannel, PerTensor
from qtk.errors import CalibrationError
from qtk.observers.histogram import Histogram
from qtk.observers.weighted_histogram import UNIFORM, WeightedHistogram


def batches(seed=0, count=6):
    """Of different sizes and places, with weights from 0 on."""
    generator = torch.Generator().manual_seed(seed)
    values = [
        torch.randn(7, 5, generator=generator) * 10.0 ** float(torch.rand(1, generator=generator) * 4 - 2) + shift
        for shift in range(count)
    ]
    return [(x, torch.rand(7, 5, generator=generator).mul(3).floor().square()) for x in values]


def seen(granularity, data, bins=16):
    observer = WeightedHistogram(granularity, bins=bins)
    for x, weights in data:
        observer.observe(x)
        observer.weigh(x, weights.sqrt())
    return observer


@pytest.mark.parametrize("granularity", [PerTensor(), PerChannel(1)], ids=str)
def test_every_weight_is_in_the_bin_of_its_value(granularity):
    given = batches()
    observer = seen(granularity, given)
    values, weights = (torch.cat(each).double().numpy() for each in zip(*given, strict=True))
    whole = granularity == PerTensor()
    pairs = [(values.ravel(), weights.ravel())] if whole else zip(values.T, weights.T, strict=True)
    for row, (x, weight) in enumerate(pairs):
        edges = observer.edges[row].numpy()
        expected, _ = np.histogram(x, edges, weights=weight)
        np.testing.assert_allclose(observer.weights[row].numpy(), expected, rtol=1e-6)
        np.testing.assert_array_equal(observer.counts[row].numpy(), np.histogram(x, edges)[0])


@pytest.mark.parametrize("granularity", [PerTensor(), PerChannel(0)], ids=str)
def test_order_and_merging_make_no_difference(granularity):
    given = batches()
    expected = seen(granularity, given)
    assert torch.equal(seen(granularity, given[::-1]).weights, expected.weights)  # whole numbers, whose sums are exact
    for cut in range(len(given) + 1):
        left, right = seen(granularity, given[:cut]), seen(granularity, given[cut:])
        before = copy.deepcopy(right)
        left.merge(right)
        assert torch.equal(left.weights, expected.weights)
        assert torch.equal(left.counts, expected.counts)
        if cut < len(given):
            assert torch.equal(right.weights, before.weights)


def test_a_share_is_spread_evenly():
    x, weights = torch.tensor([0.0, 1.0, 1.0, 4.0]), torch.tensor([2.0, 0.0, 0.0, 6.0])
    observer = seen(PerTensor(), [(x, weights)])
    found, mean = observer.samples().counts[0], 2.0
    for value, count, weight in ((0.0, 1, 2.0), (1.0, 2, 0.0), (4.0, 1, 6.0)):
        place = int((observer.edges[0] <= value).sum()) - 1
        assert float(found[place]) == pytest.approx(((1 - UNIFORM) * weight + UNIFORM * mean * count) / mean)
    assert float(found.sum()) == pytest.approx(4)


def test_without_weights_every_element_counts_the_same():
    observer, plain = WeightedHistogram(PerTensor(), bins=16), Histogram(PerTensor(), bins=16)
    for x, _ in batches():
        observer.observe(x)
        plain.observe(x)
    assert torch.equal(observer.samples().counts, plain.samples().counts.double())
    for x, _ in batches():
        observer.weigh(x, torch.zeros_like(x))
    assert torch.equal(observer.samples().counts, plain.samples().counts.double())


def test_weights_that_are_no_numbers_count_nothing():
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    observer = seen(PerTensor(), [(x, torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0]))])
    assert float(observer.weights.sum()) == 1


def test_masked_values_have_no_weight():
    observer = WeightedHistogram(PerTensor(), bins=16)
    observer.allows_mask = True
    x = torch.tensor([-torch.inf, 1.0, 2.0])
    observer.observe(x)
    observer.weigh(x, torch.tensor([10.0, 1.0, 1.0]))
    assert float(observer.weights.sum()) == 2


def test_nothing_seen_is_an_error():
    observer = WeightedHistogram(PerTensor())
    observer.weigh(torch.ones(3), torch.ones(3))
    assert observer.weights is None
    with pytest.raises(CalibrationError, match="no data was observed"):
        observer.samples()
