"""What every backend of ``qtk::fake_quantize`` must do, whatever it runs on: the checks and the cases."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from qtk.core.granularity import WHOLE
from qtk.numerics import affine

Forward = Callable[..., Tensor]
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]

KINDS = (torch.float32, torch.bfloat16, torch.float16)
ZERO_POINTS = (None, torch.int32, torch.float32)
CODES = {"int8": (-128, 127), "uint4": (0, 15), "int2": (-2, 1), "int16": (-32768, 32767), "narrow": (-7, 7),
         "reduced": (-64, 64)}
SHAPES = {  # shape, block size: granularities on odd shapes
    "tensor": ((1023,), ()),
    "tensor_small": ((1,), ()),
    "tensor_scalar": ((), ()),
    "tensor_empty": ((0, 3), ()),
    "tensor_large": ((37, 1031), ()),
    "channel_first": ((7, 131), (1, WHOLE)),
    "channel_last": ((131, 7), (WHOLE, 1)),
    "channel_last_wide": ((5, 2053), (WHOLE, 1)),
    "channel_middle": ((3, 5, 7, 11), (WHOLE, 1, WHOLE, WHOLE)),
    "channel_of_a_vector": ((13,), (1,)),
    "channel_of_nothing": ((0, 3), (WHOLE, 1)),
    "block_rows": ((6, 96), (1, 32)),
    "block_columns": ((64, 5), (16, 1)),
    "block_tiles": ((12, 30), (4, 5)),
    "block_of_a_wide_axis": ((4, 6144), (1, 2048)),
    "block_single": ((5, 8), (1, 4)),
    "block_whole": ((6, 9), (2, WHOLE)),
    "block_deep": ((2, 6, 3, 5), (1, 2, 1, WHOLE)),
    "block_ones": ((3, 4), (1, 1)),
}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "reversed_axes": lambda x: x.permute(list(range(x.ndim))[::-1]).contiguous().permute(list(range(x.ndim))[::-1]),
    "first_axis_inside": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0) if x.ndim else x,
    "with_gaps": lambda x: x.repeat_interleave(2, -1)[..., ::2] if x.ndim else x,
    "offset": lambda x: torch.cat((x.new_zeros(3), x.reshape(-1)))[3:].reshape(x.shape),
}


def counts(shape: Sequence[int], block_size: Sequence[int]) -> tuple[int, ...]:
    """How many scales there are along each axis."""
    if not block_size:
        return (1,)
    return tuple(1 if size == WHOLE else length // size for length, size in zip(shape, block_size, strict=True))


def ranges(shape: Sequence[int], block_size: Sequence[int], zero_point: torch.dtype | None, qmin: int, qmax: int,
           seed: int = 0) -> tuple[Tensor, Tensor | None]:
    """Scales, and zero points if of a dtype; one kept axis gives a vector. A range that is learned strays."""
    generator = torch.Generator().manual_seed(seed)
    kept = counts(shape, block_size)
    if block_size and set(block_size) <= {1, WHOLE} and list(block_size).count(1) == 1:
        kept = (kept[list(block_size).index(1)],)
    scale = torch.rand(kept, generator=generator) * 0.2 + 0.02
    if zero_point is None:
        return scale, None
    if zero_point.is_floating_point:
        signs = torch.randint(0, 2, kept, generator=generator) * 2 - 1
        return scale * signs, (torch.rand(kept, generator=generator) * 1.2 - 0.1) * (qmax - qmin) + qmin
    return scale, torch.randint(qmin, qmax + 1, kept, generator=generator).to(zero_point)


def values(shape: Sequence[int], scale: Tensor, kind: torch.dtype, seed: int = 0) -> Tensor:
    """Random numbers about as wide as the codes; among them ties of the first scale, infinities, NaN, denormals."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tuple(shape), generator=generator) * 8 * (float(scale.abs().mean()) if scale.numel() else 1.0)
    step = float(scale.reshape(-1)[0].abs()) if scale.numel() else 1.0
    tiny = torch.finfo(kind).smallest_normal
    special = [(k + 0.5) * step for k in range(-10, 10)]
    special += [torch.inf, -torch.inf, torch.nan, 0.0, -0.0, tiny, -tiny / 2, tiny / 4, torch.finfo(kind).max,
                torch.finfo(kind).min, step * 127.5, -step * 128.5]
    count = min(len(special), x.numel())
    at = torch.randperm(x.numel(), generator=generator)[:count]
    x.view(-1)[at] = torch.tensor(special[:count]) if x.numel() > 40 else x.view(-1)[at]
    return x.to(kind)


def same_bits(own: Tensor, other: Tensor) -> bool:
    """Equal, signs of zero included, every NaN being the same."""
    if own.dtype != other.dtype or own.shape != other.shape:
        return False
    kind = {4: torch.int32, 2: torch.int16}[own.element_size()]
    own, other = (torch.where(x.isnan(), torch.zeros_like(x), x).contiguous().view(kind) for x in (own, other))
    return torch.equal(own, other)


def check_forward(forward: Forward, x: Tensor, scale: Tensor, zero_point: Tensor | None, spec: tuple) -> None:
    """The reference, bit for bit, in the layout that torch gives the result of an op on ``x``."""
    result = forward(x, scale, zero_point, *spec)
    expected = affine.fake_quantize(x, scale, zero_point, *spec)
    assert torch.equal(result.isnan(), expected.isnan())
    assert same_bits(result, expected)
    assert result.stride() == torch.empty_like(x).stride()


def owners(shape: Sequence[int], block_size: Sequence[int]) -> Tensor:
    """Number of the scale of every element, by index arithmetic. Shape: ``shape``."""
    index = torch.zeros(tuple(shape), dtype=torch.int64)
    for axis, count in enumerate(counts(shape, block_size) if block_size else ()):
        along = torch.arange(shape[axis]) // max(shape[axis] // max(count, 1), 1)
        index = index * count + along.reshape([-1 if i == axis else 1 for i in range(len(shape))])
    return index


def elements(x: Tensor, scale: Tensor, zero_point: Tensor | None, spec: tuple) -> tuple[Tensor, ...]:
    """Of every element: the number of its scale, the scale, zero point, ``x / scale``, code and whether it is one."""
    block_size, qmin, qmax = spec
    index = owners(x.shape, block_size)
    step = scale.abs().reshape(-1)[index]
    zero = torch.zeros_like(step)
    if zero_point is not None:
        zero = zero_point.float().clamp(qmin, qmax).round().reshape(-1)[index]
    steps = x.float() / step  # in float32, as the codes are
    code = steps.round() + zero
    return index, step, zero, steps, code, (code >= qmin) & (code <= qmax)


def check_backward(
    backward: Backward, grad: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor | None, spec: tuple,
    error_of_steps: float = 0.0,
) -> None:
    """dx exactly; the gradients of the range against sums in float64, within the rounding of float32 sums.

    ``error_of_steps``: how far the distance to the code may be from its float32 value, in steps of the scale.
    """
    _, qmin, qmax = spec
    dx, dscale, dzero = backward(grad, x, scale, zero_point, *spec, True, True)
    index, step, zero, steps, code, inside = elements(x, scale, zero_point, spec)
    assert torch.equal(dx, torch.where(inside, grad, torch.zeros_like(grad)))
    assert (dx.dtype, dx.stride()) == (grad.dtype, torch.empty_like(x).stride())
    slope = grad.double()
    error = torch.where(inside, code - zero - steps, code.clamp(qmin, qmax) - zero).double()
    of_scale = slope * scale.sign().reshape(-1)[index] * error
    of_zero = torch.where(inside, 0.0, -slope * step)
    for own, terms, slack in ((dscale, of_scale, error_of_steps), (dzero, of_zero, 0.0)):
        assert own.shape == scale.shape
        check_sums(own, terms, index, slope.abs() * slack)


def check_residual(
    with_residual: Callable[..., tuple[Tensor, Tensor]], x: Tensor, scale: Tensor, zero_point: Tensor | None,
    spec: tuple, learned: bool,
) -> None:
    """The values of ``check_forward`` and the residuals, element by element; some devices take denormals for 0."""
    _, qmin, qmax = spec
    x[x.abs() < torch.finfo(torch.float32).tiny] = 0.0
    check_forward(lambda *given: with_residual(*given, learned)[0], x, scale, zero_point, spec)
    _, residual = with_residual(x, scale, zero_point, *spec, learned)
    assert residual.stride() == torch.empty_like(x).stride()
    _, _, _, steps, code, inside = elements(x, scale, zero_point, spec)
    if not learned:
        expected = torch.where(inside, (x > 0) * 1, torch.where(x <= 0, -1, 2))
        assert torch.equal(residual, expected.to(torch.int8))
        return
    assert residual.dtype == torch.int16
    names = ((code < qmin, -32768), (code > qmax, 32767), (code.isnan(), -32767), (inside & (x == 0), 32766))
    rest = torch.ones_like(inside)
    for where, name in names:
        assert bool((residual[where] == name).all())
        rest &= ~where
    distance = (steps.double().round() - steps.double())[rest]
    off = (residual[rest] - 65530 * distance).abs()
    assert bool((off <= 0.5 + 32765 * 2**-24).all())  # the product is rounded to float32, then to an integer


def check_sums(own: Tensor, terms: Tensor, index: Tensor, slack: Tensor | None = None) -> None:
    """The sums of the terms of each scale, within the rounding of float32 sums and the ``slack`` of every term.

    ``index``: the scale of each term.
    """
    expected = torch.zeros(own.numel(), dtype=torch.float64).index_add(0, index.reshape(-1), terms.reshape(-1))
    size = torch.zeros_like(expected).index_add(0, index.reshape(-1), terms.abs().reshape(-1))
    bound = 4e-6 * size + 1e-30
    if slack is not None:
        bound = bound.index_add(0, index.reshape(-1), slack.reshape(-1))
    assert own.dtype == torch.float32
    error = (own.reshape(-1).double() - expected).abs()
    assert bool((error <= bound).all()), float((error / bound).max())


class Conformance:
    """The tests of one backend; a subclass whose name begins with Test says which."""

    forward: Forward
    backward: Backward

    @pytest.mark.pairwise(case=SHAPES, layout=LAYOUTS, kind=KINDS, zero_point=ZERO_POINTS)
    def test_forward(self, case, layout, kind, zero_point):
        shape, block_size = SHAPES[case]
        scale, zero = ranges(shape, block_size, zero_point, -8, 7)
        x = LAYOUTS[layout](values(shape, scale, kind))
        check_forward(self.forward, x, scale, zero, (block_size, -8, 7))

    @pytest.mark.parametrize("codes", CODES)
    @pytest.mark.parametrize("case", ["tensor", "channel_first", "channel_last", "block_tiles"])
    def test_forward_of_every_width(self, case, codes):
        shape, block_size = SHAPES[case]
        scale, zero = ranges(shape, block_size, torch.int32, *CODES[codes])
        x = values(shape, scale, torch.float32)
        check_forward(self.forward, x * 10, scale, zero, (block_size, *CODES[codes]))

    @pytest.mark.pairwise(case=SHAPES, layout=LAYOUTS, kind=KINDS, zero_point=ZERO_POINTS)
    def test_backward(self, case, layout, kind, zero_point):
        shape, block_size = SHAPES[case]
        scale, zero = ranges(shape, block_size, zero_point, -8, 7)
        x = torch.nan_to_num(values(shape, scale, kind), nan=0.5)
        grad = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(kind)
        check_backward(self.backward, grad, LAYOUTS[layout](x), scale, zero, (block_size, -8, 7))
        check_backward(self.backward, LAYOUTS[layout](grad), x, scale, zero, (block_size, -8, 7))


class ResidualConformance:
    """The tests of one backend of ``qtk::fake_quantize_with_residual`` and of its gradient."""

    with_residual: Callable[..., tuple[Tensor, Tensor]]
    residual_backward: Backward

    @pytest.mark.pairwise(case=SHAPES, layout=LAYOUTS, kind=KINDS, zero_point=ZERO_POINTS, learned=(False, True))
    def test_residual(self, case, layout, kind, zero_point, learned):
        shape, block_size = SHAPES[case]
        scale, zero = ranges(shape, block_size, zero_point, -8, 7)
        x = LAYOUTS[layout](values(shape, scale, kind))
        check_residual(self.with_residual, x, scale, zero, (block_size, -8, 7), learned)

    @pytest.mark.parametrize("codes", CODES)
    @pytest.mark.parametrize("case", ["tensor", "channel_first", "channel_last", "block_tiles"])
    def test_residual_of_every_width(self, case, codes):
        shape, block_size = SHAPES[case]
        scale, zero = ranges(shape, block_size, torch.int32, *CODES[codes])
        x = values(shape, scale, torch.float32) * 10
        for learned in (False, True):
            check_residual(self.with_residual, x, scale, zero, (block_size, *CODES[codes]), learned)

    @pytest.mark.pairwise(case=SHAPES, layout=LAYOUTS, kind=KINDS, zero_point=ZERO_POINTS)
    def test_backward_of_residual(self, case, layout, kind, zero_point):
        shape, block_size = SHAPES[case]
        scale, zero = ranges(shape, block_size, zero_point, -8, 7)
        x = torch.nan_to_num(values(shape, scale, kind), nan=0.5)
        grad = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(kind)

        def backward(grad, x, scale, zero, *spec):
            fixed, learned = (self.with_residual(x, scale, zero, *spec[:3], learned)[1] for learned in (False, True))
            dx, dscale, dzero = self.residual_backward(grad, learned, scale, zero, *spec)
            for alone in (fixed, learned):
                same, *empty = self.residual_backward(grad, alone, scale, zero, *spec[:3], False, False)
                assert same_bits(same, dx)
                assert [part.numel() for part in empty] == [0, 0]
            return dx, dscale, dzero

        half_a_unit = 0.5001 / 65530
        check_backward(backward, grad, LAYOUTS[layout](x), scale, zero, (block_size, -8, 7), half_a_unit)
        check_backward(backward, LAYOUTS[layout](grad), x, scale, zero, (block_size, -8, 7), half_a_unit)

    def test_nan_has_no_gradient_and_spoils_that_of_its_scale(self):
        x = torch.tensor([[torch.nan, 1.0], [1.0, 2.0]])
        _, residual = self.with_residual(x, torch.ones(2), None, [1, -1], -8, 7, True)
        dx, dscale, _ = self.residual_backward(torch.ones(2, 2), residual, torch.ones(2), None, [1, -1], -8, 7, True,
                                               False)
        assert dx.tolist() == [[0, 1], [1, 1]]
        assert dscale.isnan().tolist() == [True, False]

    def test_a_gradient_of_another_dtype_or_spread_out(self):
        x, scale = torch.randn(37, 1031), torch.rand(37) + 0.1
        spec = ((1, -1), -8, 7)

        def backward(grad, x, *given):
            _, residual = self.with_residual(x, *given[:5], True)
            return self.residual_backward(grad, residual, *given)

        for grad in (torch.randn(37, 1031).bfloat16(), torch.ones(()).expand(37, 1031), torch.randn(37, 1)):
            check_backward(backward, grad.expand_as(x), x, scale, None, spec, 0.5001 / 65530)
