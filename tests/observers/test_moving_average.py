import pytest
import torch

from qtk.core.granularity import PerChannel, PerTensor
from qtk.errors import CalibrationError
from qtk.observers.moving_average import MovingAverage


def batches(count=6):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, 4, generator=generator) * (1 + i) for i in range(count)]


@pytest.mark.parametrize("momentum", [0.1, 0.5, 1.0])
def test_it_is_the_recurrence(momentum):
    observer = MovingAverage(PerTensor(), momentum=momentum)
    low = high = None
    for batch in batches():
        observer.observe(batch)
        a, b = float(batch.min()), float(batch.max())
        low = a if low is None else low + momentum * (a - low)
        high = b if high is None else high + momentum * (b - high)
    assert observer.minimum.item() == pytest.approx(low, rel=1e-5)
    assert observer.maximum.item() == pytest.approx(high, rel=1e-5)
    assert observer.count == 72


@pytest.mark.parametrize("cut", range(7))
@pytest.mark.parametrize("granularity", [PerTensor(), PerChannel(1)], ids=str)
def test_merging_equals_observing_both(granularity, cut):
    data = batches()
    data[0][:, 1] = data[3][:, 1] = -torch.inf  # a channel of marks, first and in between
    data[4][0, 0] = -torch.inf
    left, right, both = (MovingAverage(granularity, momentum=0.3) for _ in range(3))
    for i, batch in enumerate(data):
        (left if i < cut else right).observe(batch)
        both.observe(batch)
    left.merge(right)
    torch.testing.assert_close(left.minimum, both.minimum, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(left.maximum, both.maximum, rtol=1e-5, atol=1e-5)
    assert (left.count, left.sentinels) == (both.count, both.sentinels) == (72 - 7, 7)


def test_merging_thrice_is_associative():
    data = batches()
    parts = [MovingAverage(PerTensor(), momentum=0.3) for _ in range(3)]
    both = MovingAverage(PerTensor(), momentum=0.3)
    for i, batch in enumerate(data):
        parts[i // 2].observe(batch)
        both.observe(batch)
    parts[1].merge(parts[2])
    parts[0].merge(parts[1])
    torch.testing.assert_close(parts[0].minimum, both.minimum)


def test_a_channel_that_saw_only_marks_is_nan():
    observer = MovingAverage(PerChannel(0))
    assert (observer.minimum, observer.maximum) == (None, None)
    observer.observe(torch.tensor([[1.0], [-torch.inf]]))
    assert observer.minimum.isnan().tolist() == [False, True]
    observer.observe(torch.tensor([[2.0], [4.0]]))
    assert observer.maximum.tolist() == pytest.approx([1.1, 4.0])


def test_nothing_seen_is_none():
    observer = MovingAverage(PerTensor())
    observer.observe(torch.full((2,), -torch.inf))
    observer.observe(torch.empty(0))
    assert (observer.minimum, observer.count, observer.sentinels) == (None, 0, 2)


def test_what_cannot_be_averaged_is_refused():
    for momentum in (0.0, -0.1, 1.5, float("nan")):
        with pytest.raises(CalibrationError, match="momentum"):
            MovingAverage(PerTensor(), momentum=momentum)
    observer = MovingAverage(PerTensor())
    with pytest.raises(CalibrationError, match="cannot join"):
        observer.merge(MovingAverage(PerTensor(), momentum=0.2))
    with pytest.raises(CalibrationError, match="NaN"):
        observer.observe(torch.tensor([torch.nan]))
    observer = MovingAverage(PerChannel(0))
    observer.observe(torch.zeros(3))
    with pytest.raises(CalibrationError, match="same channels"):
        observer.observe(torch.zeros(4))
