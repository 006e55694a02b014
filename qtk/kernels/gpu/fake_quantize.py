"""Fake-quantization to integers and small floats, and its gradient, as Triton kernels.

One launch per call, float32 inside. Formulas of ``qtk.numerics.affine``, ``minifloat``, ``straight_through``,
``residual`` and ``effective``; ``qtk.kernels.gpu.tiling`` assigns elements to programs. The gradients of scale and zero
point are reduced inside the launch: programs that share a scale store partial sums and take a ticket, and the one with
the last ticket adds them in a fixed order, so that the result is deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

from qtk.core.dtypes import FloatDtype
from qtk.kernels.backends import load_native
from qtk.kernels.gpu.codes import effective_scale, gradient, grid_at, quantize
from qtk.kernels.gpu.launch import Call, keep, kept_launch, programs, repeat, run_on_tiles, tickets
from qtk.kernels.gpu.native_launch import hand_over
from qtk.kernels.gpu.row_streams import backward_rows_kernel, forward_rows_kernel, is_row_stream, launch_rows
from qtk.kernels.gpu.tiles import (
    again,
    draws_last_ticket,
    is_dense,
    lanes,
    partials,
    places,
    store_partials,
    sums_of_lanes,
    tail,
    tile,
)
from qtk.kernels.gpu.tiling import fitted, tiling_of
from qtk.numerics import affine, minifloat, straight_through
from qtk.numerics import residual as residuals
from qtk.numerics.blocks import check_range

NATIVE = load_native() is None
NOTHING = (0, 0)

_SHARED: dict[Hashable, tuple[int, int]] = {}
"""What distinguishes a backward pass with sums → how many partial results its programs have, and groups of scales."""

Gradients: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Gradients of the tensor, its scales and its zero points."""


@triton.jit
def forward_kernel(
    x_at, y_at, residual_at, scale_at, zero_at, qmin, qmax, s1, middle, s2, inner, step1, step2, turns, splits,
    ASYMMETRIC: tl.constexpr, MANTISSA: tl.constexpr, SMALLEST: tl.constexpr, RESIDUAL: tl.constexpr,
    SCALES: tl.constexpr, REACH: tl.constexpr, COLUMNS: tl.constexpr, FLAT: tl.constexpr, SHIFT: tl.constexpr,
    TAIL: tl.constexpr,
):
    program = tl.program_id(0)
    along1, along2, exists, index = places(program // splits, s2, step1, step2, SCALES)
    grid = grid_at(scale_at, zero_at, index, exists, qmin, qmax, ASYMMETRIC, COLUMNS, not RESIDUAL)
    each = tl.cdiv(turns, splits)
    first = (program % splits) * each
    for turn in range(first, tl.minimum(first + each, turns)):
        offsets, masks = tile(
            turn, along1, along2, exists, s1, middle, s2, inner, SCALES, REACH, COLUMNS, FLAT, SHIFT, TAIL
        )
        quantize(x_at, y_at, residual_at, offsets, masks, grid, MANTISSA, SMALLEST, RESIDUAL, SHIFT)
    if TAIL:  # noqa: SIM102 - Triton compiles a branch on a constant apart
        if program % splits == splits - 1:
            offsets, masks = tail(inner)
            quantize(x_at, y_at, residual_at, offsets, masks, grid, MANTISSA, SMALLEST, RESIDUAL, 0)


@triton.jit
def backward_kernel(
    x_at, g_at, dx_at, scale_at, zero_at, qmin, qmax, parts_at, of_scale_at, of_zero_at, tickets_at, s1,
    middle, s2, inner, step1, step2, turns, splits,
    ASYMMETRIC: tl.constexpr, MANTISSA: tl.constexpr, SMALLEST: tl.constexpr, RESIDUAL: tl.constexpr,
    SUMS: tl.constexpr, OF_ZERO: tl.constexpr, SCALES: tl.constexpr, REACH: tl.constexpr, COLUMNS: tl.constexpr,
    FLAT: tl.constexpr, SHIFT: tl.constexpr, TAIL: tl.constexpr, LANES: tl.constexpr, PARTS: tl.constexpr,
):
    program = tl.program_id(0)
    along1, along2, exists, index = places(program // splits, s2, step1, step2, SCALES)
    grid = grid_at(scale_at, zero_at, index, exists, qmin, qmax, ASYMMETRIC, COLUMNS, False)
    of_scale = tl.zeros([LANES, SCALES] if COLUMNS else [SCALES, LANES], tl.float32)
    clipped = of_scale
    each = tl.cdiv(turns, splits)
    first = (program % splits) * each
    for turn in range(first, tl.minimum(first + each, turns)):
        offsets, masks = tile(
            turn, along1, along2, exists, s1, middle, s2, inner, SCALES, REACH, COLUMNS, FLAT, SHIFT, TAIL
        )
        g, inside, error = gradient(x_at, g_at, dx_at, offsets, masks, grid, MANTISSA, SMALLEST, RESIDUAL, SHIFT)
        if SUMS:
            upstream = g.to(tl.float32)
            of_scale += sums_of_lanes(upstream * error, SCALES, REACH, COLUMNS, LANES)
            clipped += sums_of_lanes(tl.where(inside, 0.0, upstream), SCALES, REACH, COLUMNS, LANES)
    sum_of_scale = tl.sum(of_scale, 0 if COLUMNS else 1)
    sum_clipped = tl.sum(clipped, 0 if COLUMNS else 1)
    if TAIL:  # noqa: SIM102 - Triton compiles a branch on a constant apart
        if program % splits == splits - 1:
            offsets, masks = tail(inner)
            if SUMS:  # registers are few
                grid = grid_at(scale_at, zero_at, again(index), exists, qmin, qmax, ASYMMETRIC, COLUMNS, False)
            g, inside, error = gradient(x_at, g_at, dx_at, offsets, masks, grid, MANTISSA, SMALLEST, RESIDUAL, 0)
            if SUMS:
                upstream = g.to(tl.float32)
                sum_of_scale += tl.sum(upstream * error, 1)
                sum_clipped += tl.sum(tl.where(inside, 0.0, upstream), 1)
    if SUMS:
        store_sums(
            again(program), sum_of_scale, sum_clipped, scale_at, parts_at, of_scale_at, of_zero_at, tickets_at, s2,
            step1, step2, splits, OF_ZERO, SCALES, PARTS,
        )


@triton.jit
def store_sums(
    program, sum_of_scale, sum_clipped, scale_at, parts_at, of_scale_at, of_zero_at, tickets_at, s2, step1, step2,
    splits, OF_ZERO: tl.constexpr, SCALES: tl.constexpr, PARTS: tl.constexpr,
):
    """Stores the gradients of the scales of a group if this is its last program, else this program's part of them."""
    group = program // splits
    _, _, exists, index = places(group, s2, step1, step2, SCALES)
    last = splits == 1
    if splits > 1:
        store_partials(parts_at, program, sum_of_scale, sum_clipped, SCALES)
        last = draws_last_ticket(tickets_at + group, splits)
        if last:
            sum_of_scale = tl.zeros_like(sum_of_scale)
            sum_clipped = tl.zeros_like(sum_clipped)
            for begin in range(0, splits, PARTS):
                first_at, second_at, there = partials(parts_at, group, begin, splits, PARTS, SCALES)
                sum_of_scale += tl.sum(tl.load(first_at, mask=there, other=0.0, cache_modifier=".cg"), 0)
                sum_clipped += tl.sum(tl.load(second_at, mask=there, other=0.0, cache_modifier=".cg"), 0)
            tl.store(tickets_at + group, 0)
    if last:
        given = tl.load(scale_at + index, mask=exists, other=1.0)
        own_scale = effective_scale(given)
        # a learned scale acts by its absolute value
        sum_of_scale = tl.where(given < 0, -sum_of_scale, sum_of_scale)
        sum_of_scale = tl.where(own_scale == tl.abs(given), sum_of_scale, 0.0)
        tl.store(of_scale_at + index, sum_of_scale, mask=exists)
        if OF_ZERO:
            tl.store(of_zero_at + index, -sum_clipped * own_scale, mask=exists)


@dataclass(frozen=True, slots=True)
class Grid:
    """The quantization grid at scale 1: integers, or the numbers of a minifloat (see ``number_of``)."""

    lowest: float
    highest: float
    mantissa: int = -1
    smallest: int = 0

    @property
    def ends(self) -> tuple[float, float]:
        return self.lowest, self.highest

    @property
    def constants(self) -> dict[str, int]:
        return {"MANTISSA": self.mantissa, "SMALLEST": self.smallest}


def _likeness(
    x: Tensor, scale: Tensor, zero_point: Tensor | None, block_size: Sequence[int], grid: Grid
) -> tuple[Hashable, ...]:
    """What the launch of a call depends on but addresses."""
    zeros = None if zero_point is None else (zero_point.shape, zero_point.stride(), zero_point.dtype)
    return (
        x.get_device(), x.shape, x.stride(), x.dtype, scale.shape, scale.stride(), scale.dtype, zeros,
        tuple(block_size), grid.lowest, grid.highest, grid.mantissa, grid.smallest,
    )


def _shared(scale: Tensor, sizes: tuple[int, int]) -> tuple[Tensor, ...]:
    """What the programs that share a group of scales add up in: partial results, and counters. None of ``NOTHING``."""
    results, groups = sizes
    return (scale.new_empty(results), tickets(scale.device, groups)) if results else ()


def forward(
    x: Tensor, scale: Tensor, zero_point: Tensor | None, block_size: Sequence[int], grid: Grid,
    reference: Callable[[Tensor], tuple[Tensor, Tensor]], residual: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Fake-quantizes ``x``; with blocks along more than two axes by ``reference``.

    The second result is the residual if of a dtype, else unspecified.

    Raises: SpecError if scale or zero point do not fit ``x``.
    """
    result = torch.empty_like(x)
    kept = result if residual is None else torch.empty_like(x, dtype=residual)
    call = Call(
        ("forward", residual, *_likeness(x, scale, zero_point, block_size, grid)),
        (x, result, scale, *(() if residual is None else (kept,)), *(() if zero_point is None else (zero_point,))),
    )
    if repeat(call):
        return result, kept
    check_range(scale, zero_point, x.shape, block_size)
    if not x.numel():
        return result, kept
    tiling = tiling_of(x, block_size) if is_dense(x) else None
    if tiling is None and x.is_contiguous():
        return reference(x)
    if tiling is None:
        flat, flat_kept = forward(x.contiguous(), scale, zero_point, block_size, grid, reference, residual)
        return result.copy_(flat), kept if residual is None else kept.copy_(flat_kept)
    given = x, result, kept, scale.contiguous(), scale if zero_point is None else zero_point.contiguous(), *grid.ends
    constants = {"ASYMMETRIC": zero_point is not None, "RESIDUAL": 0 if residual is None else 8 * residual.itemsize,
                 **grid.constants}
    if is_row_stream(tiling):
        launch_rows(forward_rows_kernel, tiling, given[:3], given[3:], constants, call)
        return result, kept
    run_on_tiles(call, forward_kernel, fitted(tiling, x, result, kept), *given, **constants)
    return result, kept


def backward(
    grad: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor | None, block_size: Sequence[int], grid: Grid,
    wants_scale: bool, wants_zero_point: bool, reference: Callable[[Tensor, Tensor], Gradients],
) -> Gradients:
    """The gradients of ``forward``, empty for those not wanted; ``reference`` as in ``forward``.

    ``x`` may be a residual.

    Raises: SpecError if scale or zero point do not fit ``x``.
    """
    dx = torch.empty_like(x, dtype=grad.dtype)
    sums = wants_scale or wants_zero_point
    of_scale = torch.empty_like(scale) if sums else scale.new_empty(0)
    of_zero = torch.empty_like(scale) if wants_zero_point else scale.new_empty(0)
    of_range = (of_scale, of_zero) if sums else ()
    tensors = (x, grad, dx, scale, *of_range, *(() if zero_point is None else (zero_point,)))
    likeness = (
        "backward", sums, wants_zero_point, grad.stride(), grad.dtype,
        *_likeness(x, scale, zero_point, block_size, grid),
    )
    shared = _SHARED.get(likeness) if sums else NOTHING
    if shared is not None and repeat(Call(likeness, (*tensors, *_shared(scale, shared)))):
        return dx, of_scale if wants_scale else scale.new_empty(0), of_zero
    check_range(scale, zero_point, x.shape, block_size)
    if not x.numel():
        return dx, of_scale.zero_(), of_zero.zero_()
    tiling = tiling_of(x, block_size) if is_dense(x) else None
    if tiling is None and x.is_contiguous():
        return reference(grad, x)
    if tiling is None:
        flat, of_scale, of_zero = backward(
            grad.contiguous(), x.contiguous(), scale, zero_point, block_size, grid, wants_scale, wants_zero_point,
            reference,
        )
        return dx.copy_(flat), of_scale, of_zero
    upstream = grad if grad.stride() == x.stride() else torch.empty_like(dx).copy_(grad)
    given = x, upstream, dx, scale.contiguous(), scale if zero_point is None else zero_point.contiguous(), *grid.ends
    constants = {"ASYMMETRIC": zero_point is not None, "RESIDUAL": 0 if x.is_floating_point() else 8 * x.itemsize,
                 **grid.constants}
    if not sums and is_row_stream(tiling):
        launch_rows(backward_rows_kernel, tiling, given[:3], given[3:], constants, Call(likeness, tensors))
        return dx, of_scale, of_zero
    tiling = fitted(tiling, x, upstream, dx, sums=sums)
    splits = tiling.splits(programs(x.device))
    constants |= {"SUMS": sums, "OF_ZERO": wants_zero_point, "LANES": lanes(tiling, x, grad) if sums else 1,
                  "PARTS": tiling.parts(splits) if sums else 1}
    if not sums:
        run_on_tiles(
            Call(likeness, tensors), backward_kernel, tiling, *given, scale, scale, scale, scale, **constants
        )
        return dx, of_scale, of_zero
    shared = (tiling.partial_results(splits), tiling.groups) if splits > 1 else NOTHING
    of_all = _shared(scale, shared)
    parts, counts = of_all or (scale, scale)  # what nobody shares is written at once
    keep(_SHARED, likeness, shared)
    run_on_tiles(
        Call(likeness, (*tensors, *of_all)), backward_kernel, tiling, *given, parts, of_scale, of_zero, counts,
        **constants,
    )
    return dx, of_scale if wants_scale else scale.new_empty(0), of_zero


def fake_quantize(
    x: Tensor, scale: Tensor, zero_point: Tensor | None, block_size: Sequence[int], qmin: int, qmax: int
) -> Tensor:
    """As ``qtk.ops.fake_quantize.fake_quantize``. Raises: SpecError if scale or zero point do not fit ``x``."""
    def reference(x: Tensor) -> tuple[Tensor, Tensor]:
        return (affine.fake_quantize(x, scale, zero_point, block_size, qmin, qmax),) * 2

    grid = Grid(float(qmin), float(qmax))
    result = forward(x, scale, zero_point, block_size, grid, reference)[0]
    if NATIVE and (launch := kept_launch(("forward", None, *_likeness(x, scale, zero_point, block_size, grid)))):
        hand_over(launch, x, scale, zero_point, block_size, qmin, qmax)
    return result


def fake_quantize_backward(
    grad: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor | None, block_size: Sequence[int], qmin: int, qmax: int,
    wants_scale: bool, wants_zero_point: bool,
) -> Gradients:
    """As ``qtk.numerics.straight_through.fake_quantize_backward``, an empty tensor for a gradient that is not wanted.

    Raises: SpecError if scale or zero point do not fit ``x``.
    """
    wants = wants_scale, wants_zero_point
    return backward(
        grad, x, scale, zero_point, block_size, Grid(float(qmin), float(qmax)), *wants,
        lambda grad, x: straight_through.fake_quantize_backward(
            grad, x, scale, zero_point, block_size, qmin, qmax, *wants),
    )


def fake_quantize_with_residual(
    x: Tensor, scale: Tensor, zero_point: Tensor | None, block_size: Sequence[int], qmin: int, qmax: int, learned: bool
) -> tuple[Tensor, Tensor]:
    """As ``qtk.numerics.residual.fake_quantize``. Raises: SpecError if scale or zero point do not fit ``x``."""
    return forward(
        x, scale, zero_point, block_size, Grid(float(qmin), float(qmax)),
        lambda x: residuals.fake_quantize(x, scale, zero_point, block_size, qmin, qmax, learned),
        torch.int16 if learned else torch.int8,
    )


def fake_quantize_residual_backward(
    grad: Tensor, residual: Tensor, scale: Tensor, zero_point: Tensor | None, block_size: Sequence[int], qmin: int,
    qmax: int, wants_scale: bool, wants_zero_point: bool,
) -> Gradients:
    """As ``qtk.numerics.residual.fake_quantize_backward``, an empty tensor for a gradient that is not wanted.

    Raises: as that function.
    """
    wants = wants_scale, wants_zero_point

    def reference(grad: Tensor, residual: Tensor) -> Gradients:
        return residuals.fake_quantize_backward(grad, residual, scale, zero_point, block_size, qmin, qmax, *wants)

    if residual.dtype == torch.int8 and (wants_scale or wants_zero_point):
        return reference(grad, residual)  # raises
    grid = Grid(float(qmin), float(qmax))
    return backward(grad, residual, scale, zero_point, block_size, grid, *wants, reference)


def fake_quantize_float(
    x: Tensor, scale: Tensor, block_size: Sequence[int], exponent_bits: int, mantissa_bits: int, largest: float
) -> Tensor:
    """As ``qtk.numerics.minifloat.fake_quantize``."""
    format = minifloat.format_of(exponent_bits, mantissa_bits, largest)

    def reference(x: Tensor) -> tuple[Tensor, Tensor]:
        return (minifloat.fake_quantize(x, scale, block_size, format),) * 2

    return forward(x, scale, None, block_size, _grid(format), reference)[0]


def fake_quantize_float_backward(
    grad: Tensor, x: Tensor, scale: Tensor, block_size: Sequence[int], exponent_bits: int, mantissa_bits: int,
    largest: float, wants_scale: bool,
) -> tuple[Tensor, Tensor]:
    """As ``qtk.numerics.minifloat.fake_quantize_backward``, an empty tensor for a gradient that is not wanted."""
    format = minifloat.format_of(exponent_bits, mantissa_bits, largest)

    def reference(grad: Tensor, x: Tensor) -> Gradients:
        return *minifloat.fake_quantize_backward(grad, x, scale, block_size, format), scale.new_empty(0)

    dx, of_scale, _ = backward(grad, x, scale, None, block_size, _grid(format), wants_scale, False, reference)
    return dx, of_scale


def _grid(format: FloatDtype) -> Grid:
    return Grid(format.minimum, format.maximum, format.mantissa_bits, minifloat.smallest_exponent(format))
