import pytest
import torch

from qtk.core.granularity import PerChannel, PerTensor
from qtk.errors import CalibrationError, SpecError
from qtk.observers import extremes, min_max, together
from qtk.observers.histogram import Histogram
from qtk.observers.min_max import MinMax
from qtk.observers.together import Together

XS = [torch.tensor([[1.0, -2.0, 5.0], [0.5, 3.0, -1e31]]), torch.tensor([[4.0], [-7.0]]), torch.zeros(0, 3)]


@pytest.fixture
def shared(monkeypatch):
    """Launches are shared, of what is on the CPU; the number of tensors of each is noted."""
    monkeypatch.setattr(together, "shares_launches", lambda device: True)
    for module in (extremes, min_max):
        monkeypatch.setattr(module, "on_cpu", lambda x: False)
    sizes, add = [], together.add_to_all

    def noted(runnings, *rest):
        sizes.append(len(runnings))
        add(runnings, *rest)

    monkeypatch.setattr(together, "add_to_all", noted)
    return sizes


def test_the_ends_are_those_of_one_after_the_other(shared):
    observers = [MinMax(PerTensor()), MinMax(PerChannel(0)), MinMax(PerTensor())]
    both = Together()
    for observer, x in zip(observers, XS, strict=True):
        both.observe(observer, x)
    assert shared == []
    assert observers[0].is_new
    both.finish()
    assert shared == [2]  # nothing is in the third
    assert (observers[0].minimum.tolist(), observers[0].maximum.tolist()) == ([-2.0], [5.0])
    assert (observers[0].count, observers[0].sentinels) == (5, 1)
    assert (observers[1].minimum.tolist(), observers[1].maximum.tolist()) == ([4.0, -7.0], [4.0, -7.0])
    assert observers[2].minimum is None


def test_another_tensor_joins_what_was_observed_together(shared):
    observer, both = MinMax(PerChannel(0)), Together()
    both.observe(observer, XS[1])
    both.finish()
    both.observe(observer, torch.tensor([[-1.0], [9.0]]))  # at once
    assert (observer.minimum.tolist(), observer.maximum.tolist(), observer.count) == ([-1.0, -7.0], [4.0, 9.0], 4)
    both.finish()
    assert shared == [1]


def test_what_is_broken_or_does_not_fit(shared):
    both = Together()
    masked, good = MinMax(PerTensor()), MinMax(PerTensor())
    masked.allows_mask = False
    x = torch.ones(1000)
    x[3] = -torch.inf
    both.observe(masked, x)
    both.observe(good, x)
    both.finish()
    good.check()
    with pytest.raises(CalibrationError, match="NaN or infinity"):
        masked.check()
    with pytest.raises(SpecError):
        both.observe(MinMax(PerChannel(3)), x)


def test_others_observe_at_once(shared):
    observer = Histogram(PerTensor(), bins=16)
    Together().observe(observer, XS[0])
    assert observer.count == 5


def test_on_the_cpu_nothing_waits():
    observer = MinMax(PerTensor())
    Together().observe(observer, XS[1])
    assert observer.minimum.tolist() == [-7.0]
