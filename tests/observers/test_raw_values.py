import pytest
import torch

from qtk.core.granularity import PerBlock, PerChannel, PerTensor
from qtk.errors import CalibrationError
from qtk.observers.raw_values import RawValues


@pytest.mark.parametrize(
    ("granularity", "expected"),
    [
        (PerTensor(), [[0, 1, 2, 3, 4, 5, 6, 7]]),
        (PerChannel(1), [[0, 4], [1, 5], [2, 6], [3, 7]]),
        (PerBlock((1, 2)), [[0, 1], [2, 3], [4, 5], [6, 7]]),
    ],
    ids=str,
)
def test_every_element_of_every_scale(granularity, expected):
    observer = RawValues(granularity)
    observer.observe(torch.arange(8.0).reshape(2, 4))
    samples = observer.samples()
    assert samples.values.tolist() == expected
    assert samples.counts is None
    assert samples.low.tolist() == [min(row) for row in expected]
    assert samples.high.tolist() == [max(row) for row in expected]
    assert observer.shape == granularity.qparam_shape((2, 4))


def test_two_tensors_and_two_observers_join():
    both, left, right = RawValues(PerChannel(0)), RawValues(PerChannel(0)), RawValues(PerChannel(0))
    first, second = torch.randn(3, 2), torch.randn(3, 5)
    both.observe(first)
    both.observe(second)
    left.observe(first)
    right.observe(second)
    left.merge(right)
    assert torch.equal(both.samples().values, torch.cat([first, second], 1).double())
    assert torch.equal(left.samples().values, both.samples().values)
    assert left.count == 21


def test_mask_sentinels_count_nothing():
    observer = RawValues(PerChannel(0))
    observer.observe(torch.tensor([[1.0, -torch.inf], [-torch.inf, -torch.inf]]))
    samples = observer.samples()
    assert samples.counts.tolist() == [[1, 0], [0, 0]]
    assert samples.low[0] == samples.high[0] == 1
    assert samples.low[1].isnan()
    assert (observer.count, observer.sentinels) == (1, 3)


def test_what_does_not_fit_is_refused():
    observer = RawValues(PerChannel(0))
    with pytest.raises(CalibrationError, match="no data"):
        observer.samples()
    observer.observe(torch.randn(3, 2))
    with pytest.raises(CalibrationError, match="same channels"):
        observer.observe(torch.randn(4, 2))
    with pytest.raises(CalibrationError, match="cannot join"):
        observer.merge(RawValues(PerTensor()))
    with pytest.raises(CalibrationError, match="NaN"):
        observer.observe(torch.tensor([[torch.nan]] * 3))
