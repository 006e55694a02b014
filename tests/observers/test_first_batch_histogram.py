import copy

import numpy as np
import pytest
import torch

from qtk.core.granularity import PerChannel, PerTensor
from qtk.errors import CalibrationError
from qtk.observers.first_batch_histogram import BINS, FirstBatchHistogram


def brute_force(batches):
    """Left ends and mean shares, element by element."""
    first = next(batch for batch in batches if batch.any())
    low, high = float(first.min()), float(first.max())
    middle = (low + high) / 2
    begin, end = middle - 3 * (middle - low), middle + 3 * (high - middle)
    width = (end - begin) / BINS
    shares, used = np.zeros(BINS), 0
    started = False
    for batch in batches:
        started = started or bool(batch.any())
        if not started:
            continue
        used += 1
        for value in batch.reshape(-1).tolist():
            place = value / width - begin / width
            slot = int(np.floor(abs(place) + 0.5) * np.sign(place))
            if 0 <= slot < BINS:
                shares[slot] += 1 / batch.numel()
    return begin + width * np.arange(BINS), shares / used


def test_every_batch_weighs_the_same_on_the_grid_of_the_first():
    generator = torch.Generator().manual_seed(0)
    batches = [torch.zeros(30), torch.randn(100, generator=generator), torch.randn(7, generator=generator) * 5,
               torch.zeros(11), torch.tensor([1000.0, 0.5])]
    observer = FirstBatchHistogram(PerTensor())
    for batch in batches:
        observer.observe(batch)
    left, shares, seen = observer.shares()
    expected_left, expected = brute_force(batches)
    np.testing.assert_allclose(left[0].numpy(), expected_left, rtol=1e-12)
    np.testing.assert_allclose(shares[0].numpy(), expected, atol=1e-15)
    assert seen.tolist() == [True]
    assert observer.count == 150


def test_channels_have_grids_of_their_own():
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(3, 40, generator=generator) * torch.tensor([[1.0], [10.0], [0.1]]) for _ in range(3)]
    observer = FirstBatchHistogram(PerChannel(0))
    for batch in batches:
        observer.observe(batch)
    for channel in range(3):
        left, shares = brute_force([batch[channel] for batch in batches])
        np.testing.assert_allclose(observer.shares()[0][channel].numpy(), left, rtol=1e-12)
        np.testing.assert_allclose(observer.shares()[1][channel].numpy(), shares, atol=1e-15)


def test_only_zeros_have_no_grid():
    observer = FirstBatchHistogram(PerTensor())
    observer.observe(torch.zeros(5))
    assert observer.shares() is None
    assert observer.count == 5


def test_two_runs_cannot_join():
    left, right, empty = (FirstBatchHistogram(PerTensor()) for _ in range(3))
    left.observe(torch.ones(3))
    right.observe(torch.ones(3))
    with pytest.raises(CalibrationError, match="first batch"):
        left.merge(right)
    left.merge(empty)
    empty.merge(left)
    assert torch.equal(empty.shares()[1], left.shares()[1])


def test_a_constant_has_a_range_of_one_around_it():
    observer = FirstBatchHistogram(PerChannel(0))
    observer.observe(torch.tensor([[5.0, 5.0], [1.0, 2.0]]))
    observer.observe(torch.tensor([[5.25, 5.5], [1.0, 2.0]]))
    left, shares, _ = observer.shares()
    assert left[0, 0] == 3.5
    assert left[0, -1] + (left[0, 1] - left[0, 0]) == 6.5
    assert shares.sum(1).tolist() == pytest.approx([1, 1])


def test_mask_sentinels_of_both_are_counted():
    seen, marks = FirstBatchHistogram(PerTensor()), FirstBatchHistogram(PerTensor())
    seen.observe(torch.randn(10))
    marks.observe(torch.full((5,), -torch.inf))
    for left, right in ((copy.deepcopy(seen), marks), (copy.deepcopy(marks), seen)):
        left.merge(right)
        assert (left.count, left.sentinels) == (10, 5)
        left.observe(torch.randn(4))
    assert seen.count == 10
    with pytest.raises(CalibrationError, match="cannot join"):
        seen.merge(FirstBatchHistogram(PerChannel(0)))
