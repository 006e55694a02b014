"""Against every way of rounding up and down, with every output formed, in float64."""

import functools
import itertools

import pytest
import torch

from qtk.algorithms.adaround import RoundingDescent, adaround
from qtk.algorithms.output_error import OutputError
from qtk.algorithms.weight_grid import WeightGrid
from qtk.core.dtypes import dtype
from qtk.core.spec import QuantSpec
from qtk.errors import CalibrationError

FAST = functools.partial(adaround, descent=RoundingDescent(iterations=200))


class Layer:
    """A weight on a grid, and inputs. Shape: weight [groups, 1, outputs, columns]; inputs [groups, rows, columns]."""

    def __init__(self, shape, granularity="channel", *, asymmetric=False, linear=False, seed=0, range_kept=1.0,
                 mild=False):
        generator = torch.Generator().manual_seed(seed)
        groups, outputs, columns = shape
        self.weight = torch.randn(groups, 1, outputs, columns, generator=generator).double()
        mixing = torch.randn(columns, columns, generator=generator).double()
        if mild:
            mixing = torch.eye(columns) + mixing / (2 * columns**0.5)
        self.quantized = torch.randn(groups, 60, columns, generator=generator).double() @ mixing
        self.original = self.quantized
        if linear:
            self.original = self.quantized + 0.3 * torch.randn(self.quantized.shape, generator=generator).double()
        width = 4 if granularity == "block" else columns
        shared = self.weight.reshape(groups, 1, outputs, columns // width, width)
        over = (0, 1, 2, 3, 4) if granularity == "tensor" else (4,)
        low, high = shared.amin(over, keepdim=True), shared.amax(over, keepdim=True)
        if asymmetric:
            scale = ((high - low) / 15).float()
            zero = (-low / scale).round().clamp(0, 15).int().expand(shared.shape).reshape(self.weight.shape)
        else:
            scale, zero = (torch.maximum(high, -low) / 7).float(), None
        scale = (range_kept * scale).expand(shared.shape).reshape(self.weight.shape).contiguous()
        spec = QuantSpec(dtype("uint4" if asymmetric else "int4"), symmetric=not asymmetric)
        self.grid = WeightGrid(spec, scale, zero)
        self.low, self.high = (0, 15) if asymmetric else (-8, 7)

    def error(self):
        apart = self.weight[:, 0] @ (self.original - self.quantized).mT @ self.quantized
        return OutputError((self.quantized.mT @ self.quantized)[:, None],
                           None if self.original is self.quantized else apart[:, None])

    def lost(self, rounded):
        """|X w - X̂ ŵ|². Shape: [..., groups, outputs]."""
        exact, near = self.original @ self.weight[:, 0].mT, self.quantized @ rounded[..., 0, :, :].mT
        return (exact - near).square().sum(-2)

    def unavoidable(self):
        """What is lost with the best weights that are on no grid. Shape: [groups, outputs]."""
        best = torch.linalg.lstsq(self.quantized, self.original @ self.weight[:, 0].mT).solution
        return self.lost(best.mT[:, None])

    def neighbours(self):
        """The numbers below and above each weight; one twice where it is clipped."""
        scale = self.grid.scale.double()
        zero = 0 if self.grid.zero_point is None else self.grid.zero_point
        floor = (self.weight / scale).floor()
        return [((floor + up + zero).clamp(self.low, self.high) - zero) * scale for up in (0, 1)]


def each_kind(test):
    for name, values in (("linear", [False, True]), ("asymmetric", [False, True]),
                         ("granularity", ["tensor", "channel", "block"])):
        test = pytest.mark.parametrize(name, values)(test)
    return test


@pytest.mark.medium
@each_kind
def test_no_output_is_worse_than_the_nearest_and_all_together_much_better(granularity, asymmetric, linear):
    layer = Layer((2, 5, 24), granularity, asymmetric=asymmetric, linear=linear)
    found = FAST(layer.weight, layer.grid, layer.error())
    own, nearest = layer.lost(found), layer.lost(layer.grid.nearest(layer.weight))
    assert bool((own <= nearest * (1 + 1e-6)).all())  # nearest is computed in float32
    floor = layer.unavoidable()
    assert float((own - floor).sum()) < 0.7 * float((nearest - floor).sum())


@each_kind
def test_every_weight_is_on_its_grid(granularity, asymmetric, linear):
    layer = Layer((2, 5, 24), granularity, asymmetric=asymmetric, linear=linear, range_kept=0.8)
    found = FAST(layer.weight, layer.grid, layer.error())
    torch.testing.assert_close(layer.grid.nearest(found), found, rtol=1e-6, atol=0)
    assert not torch.equal(found, layer.grid.nearest(layer.weight))


@each_kind
def test_no_single_other_choice_is_better(granularity, asymmetric, linear):
    layer = Layer((2, 3, 16), granularity, asymmetric=asymmetric, linear=linear, range_kept=0.8)
    found = adaround(layer.weight, layer.grid, layer.error(), None, RoundingDescent(iterations=1))  # much to turn
    before = layer.lost(found)
    below, above = layer.neighbours()
    for column in range(16):
        other = found.clone()
        is_above = (found - above).abs()[..., column] < (found - below).abs()[..., column]
        other[..., column] = torch.where(is_above, below[..., column], above[..., column])
        assert bool((layer.lost(other) >= before * (1 - 1e-6)).all()), column


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("mild", [False, True])
@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_close_to_the_best_of_all_choices(asymmetric, linear, mild):
    found, best, nearest = 0.0, 0.0, 0.0
    for seed in range(8):
        layer = Layer((1, 3, 8), asymmetric=asymmetric, linear=linear, seed=seed, mild=mild)
        ups = torch.tensor(list(itertools.product((False, True), repeat=8)))[:, None, None, None]
        below, above = layer.neighbours()
        least = layer.lost(torch.where(ups, above[None], below[None])).min(0).values
        own = layer.lost(FAST(layer.weight, layer.grid, layer.error()))
        found, best = found + float(own.sum()), best + float(least.sum())
        nearest += float(layer.lost(layer.grid.nearest(layer.weight)).sum())
    assert nearest - found > 0.6 * (nearest - best)  # of strongly mixed columns, the descent ends in a local minimum
    if mild:
        assert found < 1.05 * best
        assert nearest > 1.1 * best


def test_independent_inputs_leave_the_nearest():
    layer = Layer((2, 5, 24))
    identity = OutputError(torch.eye(24, dtype=torch.float64).expand(2, 1, 24, 24).contiguous())
    found = FAST(layer.weight, layer.grid, identity)
    torch.testing.assert_close(found, layer.grid.nearest(layer.weight), rtol=1e-6, atol=0)


@pytest.mark.parametrize("compute", [torch.float32, torch.float64])
def test_inputs_that_are_always_zero_do_no_harm(compute):
    layer = Layer((2, 5, 24))
    layer.quantized[..., [0, 7, 8]] = 0
    layer.weight, error = layer.weight.to(compute), OutputError(layer.error().gram.to(compute))
    found = FAST(layer.weight, layer.grid, error)
    layer.weight = layer.weight.double()
    assert bool(found.isfinite().all())
    torch.testing.assert_close(layer.grid.nearest(found), found, rtol=1e-6, atol=0)
    assert float(layer.lost(found.double()).sum()) < 0.7 * float(layer.lost(layer.grid.nearest(layer.weight)).sum())


@pytest.mark.parametrize("compute", [torch.float32, torch.float64])
def test_inputs_that_are_all_zero_leave_weights_on_the_grid(compute):
    layer = Layer((2, 5, 24))
    weight = layer.weight.to(compute)
    found = FAST(weight, layer.grid, OutputError(torch.zeros(2, 1, 24, 24, dtype=compute)))
    assert bool(found.isfinite().all())
    torch.testing.assert_close(layer.grid.nearest(found), found, rtol=1e-6, atol=0)


def test_the_size_of_inputs_makes_no_difference():
    layer = Layer((1, 4, 16), linear=True)
    error = layer.error()
    found = FAST(layer.weight, layer.grid, error)
    for power in (-20, 20):
        wide = OutputError(error.gram * 2.0**power, error.linear * 2.0**power)
        assert torch.equal(FAST(layer.weight, layer.grid, wide), found)


def test_what_it_is_given_stays_as_it_is():
    layer = Layer((1, 4, 16), linear=True)
    error, weight = layer.error(), layer.weight.clone()
    gram, linear = error.gram.clone(), error.linear.clone()
    FAST(layer.weight, layer.grid, error)
    assert torch.equal(layer.weight, weight)
    assert torch.equal(error.gram, gram)
    assert torch.equal(error.linear, linear)


def test_what_it_cannot_do_is_refused():
    layer = Layer((1, 4, 16))
    small = WeightGrid(QuantSpec(dtype("fp8_e4m3"), symmetric=True), layer.grid.scale)
    with pytest.raises(CalibrationError, match="codes that are integers, not"):
        FAST(layer.weight, small, layer.error())
    with pytest.raises(CalibrationError, match="all columns, not of blocks"):
        FAST(layer.weight, layer.grid, layer.error().diagonal_blocks(2))
