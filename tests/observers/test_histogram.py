import copy

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from qtk.core.granularity import PerBlock, PerChannel, PerTensor
from qtk.errors import CalibrationError
from qtk.observers.histogram import Histogram
from tests.calibrators.data import DATA, data, histogram

GRANULARITIES = [PerTensor(), PerChannel(0), PerChannel(1), PerBlock((4, 3))]


def batches(seed, count=5):
    """Of very different sizes and places, one constant and one of zeros."""
    generator = torch.Generator().manual_seed(seed)
    found = [
        torch.randn(8, 6, generator=generator) * 10 ** float(torch.rand(1, generator=generator) * 6 - 3)
        + float(torch.randn(1, generator=generator))
        for _ in range(count)
    ]
    return [*found, torch.full((8, 6), 0.3), torch.zeros(8, 6)]


def seen(granularity, data, **settings):
    observer = Histogram(granularity, **{"bins": 16, **settings})
    for batch in data:
        observer.observe(batch)
    return observer


def same(own, other):
    return (
        torch.equal(own.counts, other.counts) and torch.equal(own.edges, other.edges)
        and torch.equal(own.minimum, other.minimum) and torch.equal(own.maximum, other.maximum)
        and (own.count, own.sentinels) == (other.count, other.sentinels)
    )


@pytest.mark.sample(38)
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("seed", range(20))
def test_order_and_merging_make_no_difference(granularity, seed):
    given = batches(seed)
    expected = seen(granularity, given)
    order = torch.randperm(len(given), generator=torch.Generator().manual_seed(seed)).tolist()
    assert same(seen(granularity, [given[i] for i in order]), expected)
    for cut in range(len(given) + 1):
        left, right = seen(granularity, given[:cut]), seen(granularity, given[cut:])
        before = copy.deepcopy(right)
        left.merge(right)
        assert same(left, expected)
        if cut < len(given):
            assert same(right, before)


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_every_element_is_counted_in_its_bin(granularity):
    given = batches(0)
    observer = seen(granularity, given)
    assert observer.count == int(observer.counts.sum()) == 48 * len(given)
    stacked = torch.stack(given, 1).double()  # [8, batches, 6]
    rows = {
        PerTensor(): lambda x: x.reshape(1, -1), PerChannel(0): lambda x: x.flatten(1),
        PerChannel(1): lambda x: x.movedim(-1, 0).flatten(1),
        PerBlock((4, 3)): lambda x: x.reshape(2, 4, len(given), 2, 3).permute(0, 3, 1, 2, 4).reshape(4, -1),
    }[granularity](stacked)
    for row, edges, counts in zip(rows, observer.edges, observer.counts, strict=True):
        expected = np.histogram(row.numpy(), edges.numpy())[0]
        assert counts.tolist() == expected.tolist()


@pytest.mark.parametrize("name", DATA)
def test_the_grid_is_the_finest_that_fits(name):
    x = data(name)
    observer = seen(PerTensor(), x.split(700), bins=512)
    middles, counts, reach = histogram(x, 512)
    samples = observer.samples()
    assert observer.counts[0].tolist() == counts.tolist()
    assert samples.values[0].tolist() == middles.tolist()
    assert float(samples.reach) == reach


def test_between_bins_and_twice_as_many_are_in_use():
    for seed in range(50):
        x = torch.randn(100, generator=torch.Generator().manual_seed(seed)) * 3.0**seed
        observer = seen(PerTensor(), [x], bins=64)
        width = float(observer.edges[0, 1] - observer.edges[0, 0])
        assert 63 <= float(x.max() - x.min()) / width <= 128


LATER = {
    "within": torch.linspace(0.5, 1.5, 50_000),
    "a little below": torch.linspace(-0.2, 1.0, 50_000),
    "below what is counted ahead": torch.linspace(-1.5, 1.0, 50_000),
    "far below": torch.linspace(-900.0, 1.0, 50_000),
    "above": torch.linspace(0.0, 3.0, 50_000),
    "few": torch.tensor([-0.2, 1.7]),
    "masked": torch.linspace(-0.2, 1.0, 50_000).masked_fill(torch.arange(50_000) % 7 == 0, -torch.inf),
}


@pytest.mark.parametrize("later", LATER)
@pytest.mark.parametrize("place", [0.0, 100.0, -3e4, 8e5])
def test_what_is_counted_before_its_range_is_known_is_counted_all_the_same(later, place):
    first = torch.linspace(0.0, 1.8, 50_000)
    given = [first + place, LATER[later] + place, LATER["a little below"] + place]
    assert same(seen(PerTensor(), given, bins=512), seen(PerTensor(), [torch.cat(given)], bins=512))


def test_masks_of_half_precision_near_large_numbers_are_not_counted():
    x = (torch.linspace(-3e4, 3e4, 5000)).half()
    masked = torch.where(torch.arange(5000) % 5 == 0, torch.finfo(torch.float16).min, x)
    observer = seen(PerTensor(), [x, masked], bins=64)
    assert int(observer.counts.sum()) == observer.count == 9000


def test_tensors_after_the_first_are_read_once_where_the_range_hardly_grows():
    class Called(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            called.extend([func.name()] if func.namespace == "qtk" else [])
            return func(*args, **(kwargs or {}))

    called = []
    observer = seen(PerTensor(), [torch.linspace(-1.0, 1.0, 1000)])
    with Called():
        observer.observe(torch.linspace(-0.5, 0.5, 1000))
        observer.observe(torch.linspace(-1.5, 1.1, 1000))
    assert called == ["qtk::histogram_and_min_max"] * 2


@pytest.mark.parametrize("extreme", [1e30, -1e29, 1e-30, 3e38])
def test_one_value_far_out_loses_nothing(extreme):
    x = torch.randn(1000)
    observer = seen(PerTensor(), [x, torch.tensor([extreme]), x])
    assert int(observer.counts.sum()) == 2001
    assert float(observer.maximum) == max(float(x.max()), float(torch.tensor(extreme)))
    assert float(observer.minimum) == min(float(x.min()), float(torch.tensor(extreme)))


def test_growth_limits_what_later_batches_may_widen():
    x = torch.linspace(-1.0, 1.0, 100)
    observer = seen(PerTensor(), [x, torch.tensor([50.0, -50.0, 3.0])], growth=2.0)
    assert (float(observer.minimum), float(observer.maximum)) == (-3.0, 3.0)
    assert int(observer.counts.sum()) == 103
    ends = observer.counts[0].nonzero()
    assert int(observer.counts[0, ends[0]]) == 1
    assert int(observer.counts[0, ends[-1]]) == 2
    far = seen(PerTensor(), [torch.tensor([50.0, -50.0, 3.0])], growth=2.0)
    joined = seen(PerTensor(), [x], growth=2.0)
    joined.merge(far)
    assert (float(joined.minimum), float(joined.maximum)) == (-3.0, 3.0)
    assert int(joined.counts.sum()) == 103


def test_what_joins_may_have_a_coarser_grid_than_growth_allows():
    near, far = torch.rand(1000) * 2 - 1, torch.cat([torch.rand(5000) * 2 + 2, torch.tensor([100.0, -100.0])])
    joined = seen(PerTensor(), [near], bins=512, growth=3.0)
    other = seen(PerTensor(), [far], bins=512, growth=3.0)
    assert float(other.edges[0, 1] - other.edges[0, 0]) > float(joined.edges[0, 1] - joined.edges[0, 0])
    joined.merge(other)
    assert int(joined.counts.sum()) == 6002
    middles = joined.samples().values[0]
    within = int(joined.counts[0, (middles > 1.5) & (middles < 4.0)].sum())
    assert within >= 4900


def test_limits_are_those_of_the_first_batch_in_which_a_scale_was_seen():
    marks = torch.full((2,), -torch.inf)
    given = [torch.stack([torch.tensor([1.0, 2.0]), marks]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
             torch.tensor([[90.0, 2.0], [3.0, 90.0]])]
    observer = seen(PerChannel(0), given, bins=4, growth=2.0)
    assert observer.minimum.tolist() == [1.0, 3.0]
    assert observer.maximum.tolist() == [3.0, 5.0]
    assert observer.counts.sum(1).tolist() == [6, 4]
    empty = seen(PerChannel(0), [], bins=4, growth=2.0)
    empty.merge(seen(PerChannel(0), given[1:], bins=4, growth=2.0))
    empty.observe(torch.tensor([[50.0, 2.0], [3.0, -50.0]]))
    assert empty.maximum.tolist() == [3.0, 5.0]
    assert empty.minimum.tolist() == [1.0, 2.0]


def test_a_constant_first_batch_may_grow():
    observer = seen(PerTensor(), [torch.full((3,), 2.0), torch.tensor([2.5, 3.0, 9.0])], growth=1.0)
    assert float(observer.maximum) == 3.0  # as if it had been 1.5 to 2.5, half of 1 more on either side


def test_mask_sentinels_are_left_out():
    x = torch.tensor([[1.0, -torch.inf, 2.0], [-torch.inf, -torch.inf, -torch.inf]])
    observer = seen(PerChannel(0), [x])
    assert (observer.count, observer.sentinels) == (2, 4)
    assert observer.counts.sum(1).tolist() == [2, 0]
    assert observer.minimum.isnan().tolist() == [False, True]
    assert observer.samples().low.isnan().tolist() == [False, True]


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_broken_numbers_are_refused_and_change_nothing(broken):
    observer = seen(PerTensor(), [torch.tensor([1.0, 2.0])])
    before = copy.deepcopy(observer)
    with pytest.raises(CalibrationError, match="among the 2 elements"):
        observer.observe(torch.tensor([1.0, broken]))
    assert same(observer, before)


def test_what_cannot_join_is_refused():
    observer = seen(PerChannel(0), [torch.randn(3, 2)])
    for other in (seen(PerTensor(), []), seen(PerChannel(0), [], bins=8), seen(PerChannel(0), [], growth=1.0),
                  seen(PerChannel(0), [torch.randn(4, 2)])):
        with pytest.raises(CalibrationError):
            observer.merge(other)
    with pytest.raises(CalibrationError, match="same channels"):
        observer.observe(torch.randn(4, 2))


@pytest.mark.parametrize("settings", [{"bins": 1}, {"bins": 1 << 21}, {"growth": -1.0}, {"growth": float("nan")}])
def test_settings_that_make_no_sense_are_refused(settings):
    with pytest.raises(CalibrationError):
        Histogram(PerTensor(), **settings)


def test_nothing_seen_has_no_points():
    observer = seen(PerTensor(), [torch.empty(0)])
    assert observer.minimum is observer.counts is observer.edges is None
    with pytest.raises(CalibrationError, match="no data"):
        observer.samples()
