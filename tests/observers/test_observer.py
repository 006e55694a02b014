"""What all observers promise, whatever they collect."""

import pytest
import torch

from qtk.core.granularity import PerChannel
from qtk.errors import CalibrationError
from qtk.observers.first_batch_histogram import FirstBatchHistogram
from qtk.observers.histogram import Histogram
from qtk.observers.min_max import MinMax
from qtk.observers.moving_average import MovingAverage
from qtk.observers.observer import Observer
from qtk.observers.raw_values import RawValues

OBSERVERS = [FirstBatchHistogram, Histogram, MinMax, MovingAverage, RawValues]


@pytest.fixture(params=OBSERVERS)
def make(request):
    return lambda: request.param(PerChannel(0))


def test_elements_and_mask_marks_are_counted_over_tensors_and_merges(make):
    first, second = make(), make()
    first.observe(torch.ones(2, 3, requires_grad=True))
    first.observe(torch.tensor([[1.0, -torch.inf]] * 2))
    second.observe(torch.full((2, 5), -torch.inf))
    first.merge(second)
    assert (first.count, first.sentinels) == (8, 12)
    first.check()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_and_infinity_are_refused_and_leave_the_statistics_alone(make, bad):
    observer: Observer = make()
    observer.observe(torch.ones(2, 3))
    before = vars(observer).copy()
    with pytest.raises(CalibrationError):
        observer.observe(torch.tensor([[bad, 1.0], [1.0, 1.0]]))
    assert observer.count == 6
    assert all(vars(observer)[name] is value for name, value in before.items() if isinstance(value, torch.Tensor))
    observer.check()


def test_another_kind_is_not_merged(make):
    observer = make()
    with pytest.raises(CalibrationError):
        observer.merge(type(observer)(PerChannel(1)))
