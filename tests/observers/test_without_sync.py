"""What observers do on an accelerator, where no number is looked at before the end; here made to on the CPU."""

import pytest
import torch

from qtk.core.granularity import PerBlock, PerChannel, PerTensor
from qtk.errors import CalibrationError
from qtk.observers import extremes, histogram, min_max
from qtk.observers.histogram import Histogram
from qtk.observers.min_max import MinMax
from qtk.observers.moving_average import MovingAverage
from qtk.observers.weighted_histogram import WeightedHistogram

OBSERVERS = {
    "min_max": MinMax, "moving_average": MovingAverage, "histogram": lambda g: Histogram(g, bins=16),
    "limited": lambda g: Histogram(g, bins=16, growth=1.0), "weighted": lambda g: WeightedHistogram(g, bins=16),
}
GRANULARITIES = [PerTensor(), PerChannel(0), PerBlock((1, 2))]


@pytest.fixture
def blind(monkeypatch):
    """A function that runs another one without looking."""

    def run(action):
        with monkeypatch.context() as patched:
            for module in (extremes, histogram, min_max):
                patched.setattr(module, "on_cpu", lambda x: False)
            return action()

    return run


def batches():
    generator = torch.Generator().manual_seed(0)
    found = [torch.randn(4, 6, generator=generator) * 10**i for i in range(3)]
    found[1][2] = -torch.inf  # a whole channel
    found[2][0, 0] = -2e30
    return [*found, torch.full((4, 6), -torch.inf), torch.zeros(4, 6)]


def seen(make, granularity, data):
    observer = make(granularity)
    for batch in data:
        observer.observe(batch)
        if isinstance(observer, WeightedHistogram):
            observer.weigh(batch, torch.ones_like(batch))
    return observer


def state(observer):
    names = "minimum", "maximum", "counts", "edges", "weights"
    found = [getattr(observer, name, None) for name in names]
    return [None if value is None else value.nan_to_num(nan=12345.0).tolist() for value in found]


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("make", OBSERVERS.values(), ids=OBSERVERS)
def test_the_statistics_are_the_same(blind, make, granularity):
    looked = seen(make, granularity, batches())
    not_looked = blind(lambda: seen(make, granularity, batches()))
    assert state(not_looked) == state(looked)
    assert (not_looked.count, not_looked.sentinels) == (looked.count, looked.sentinels) == (120 - 31, 31)
    not_looked.check()
    joined = seen(make, granularity, batches()[:2])
    joined.merge(blind(lambda: seen(make, granularity, batches()[2:])))
    assert (joined.count, joined.sentinels) == (89, 31)
    joined.check()


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
@pytest.mark.parametrize("make", OBSERVERS.values(), ids=OBSERVERS)
def test_broken_numbers_are_found_at_the_end(blind, make, broken):
    bad = torch.tensor([[1.0, broken], [1.0, 2.0]])
    for data in ([bad], [torch.ones(2, 2), bad, torch.zeros(2, 2)]):
        observer = blind(lambda data=data: seen(make, PerChannel(0), data))
        with pytest.raises(CalibrationError, match="NaN or infinity among the"):
            observer.check()
        fine = seen(make, PerChannel(0), [torch.ones(2, 2)])
        fine.merge(observer)
        with pytest.raises(CalibrationError):
            fine.check()
