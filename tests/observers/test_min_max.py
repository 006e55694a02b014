import copy

import pytest
import torch

from qtk.core.granularity import PerBlock, PerChannel, PerTensor
from qtk.errors import CalibrationError
from qtk.observers.min_max import MinMax

GRANULARITIES = [PerTensor(), PerChannel(1), PerBlock((1, 2))]


def batches(seed=0, count=4):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(3, 4, generator=generator) * (1 + i) for i in range(count)]


def state(observer):
    low, high = observer.minimum, observer.maximum
    return None if low is None else (low.tolist(), high.tolist()), observer.count, observer.sentinels


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_seeing_batch_by_batch_is_seeing_all_at_once(granularity):
    observer = MinMax(granularity)
    for batch in batches():
        observer.observe(batch)
    stacked = torch.stack(batches())
    if granularity == PerTensor():
        low, high = stacked.amin().reshape(1), stacked.amax().reshape(1)
    elif granularity == PerChannel(1):
        low, high = stacked.amin((0, 1)), stacked.amax((0, 1))
    else:
        blocks = stacked.reshape(4, 3, 2, 2)
        low, high = blocks.amin((0, 3)), blocks.amax((0, 3))
    assert torch.equal(observer.minimum, low)
    assert torch.equal(observer.maximum, high)
    assert observer.count == 48


@pytest.mark.parametrize("cut", [0, 1, 3, 4])
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_merging_equals_observing_both(granularity, cut):
    data = batches()
    data[1][0, 0] = data[2][1, 3] = -torch.inf
    left, right, both = MinMax(granularity), MinMax(granularity), MinMax(granularity)
    for i, batch in enumerate(data):
        (left if i < cut else right).observe(batch)
        both.observe(batch)
    left.merge(right)
    assert state(left) == state(both)
    assert left.sentinels == 2


def test_a_state_that_saw_nothing_says_so():
    observer = MinMax(PerTensor())
    observer.observe(torch.empty(0))
    assert state(observer) == (None, 0, 0)
    observer.observe(torch.full((3,), -torch.inf))
    assert state(observer) == (None, 0, 3)
    observer.merge(MinMax(PerTensor()))
    assert state(observer) == (None, 0, 3)


@pytest.mark.parametrize("mark", [-torch.inf, torch.finfo(torch.float32).min])
def test_a_scale_that_saw_only_marks_is_nan_until_it_sees_more(mark):
    observer = MinMax(PerChannel(0))
    observer.observe(torch.tensor([[1.0, 2.0], [mark, mark]]))
    assert observer.minimum[0] == 1.0
    assert observer.minimum[1].isnan()
    assert observer.maximum[1].isnan()
    observer.observe(torch.tensor([[0.0], [5.0]]))
    assert (observer.minimum.tolist(), observer.maximum.tolist()) == ([0.0, 5.0], [2.0, 5.0])


def test_a_refused_tensor_leaves_no_trace():
    observer = MinMax(PerTensor())
    observer.observe(torch.tensor([1.0, 2.0]))
    before = copy.deepcopy(state(observer))
    with pytest.raises(CalibrationError):
        observer.observe(torch.tensor([-9.0, torch.nan]))
    assert state(observer) == before


def test_it_keeps_no_graph_and_works_in_inference_mode():
    observer = MinMax(PerTensor())
    observer.observe(torch.tensor([1.0], requires_grad=True) * 2)
    assert not observer.minimum.requires_grad
    with torch.inference_mode():
        observer.observe(torch.tensor([5.0]))
    observer.observe(torch.tensor([-5.0]))
    assert (observer.minimum.item(), observer.maximum.item()) == (-5.0, 5.0)


def test_it_does_not_look_at_the_tensor_later():
    observer, x = MinMax(PerChannel(0)), torch.tensor([1.0, 2.0])
    observer.observe(x)
    x.fill_(100)
    assert observer.minimum.tolist() == observer.maximum.tolist() == [1.0, 2.0]


def test_other_channels_and_other_granularities_are_refused():
    observer = MinMax(PerChannel(1))
    observer.observe(torch.zeros(2, 3))
    with pytest.raises(CalibrationError, match=r"\(3,\).*\(1,\)"):
        observer.observe(torch.zeros(2, 1))
    with pytest.raises(CalibrationError, match="cannot join"):
        observer.merge(MinMax(PerTensor()))
    assert observer.count == 6
