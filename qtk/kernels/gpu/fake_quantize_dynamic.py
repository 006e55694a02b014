"""Range and fake-quantization of a tensor as Triton kernels; formulas of ``qtk.numerics.dynamic``.

With one scale per row, one launch reads each element once: a program loads whole rows, reduces their minimum and
maximum, and quantizes them. Otherwise ``qtk.kernels.gpu.statistics`` computes minimum and maximum in a first launch,
and the second computes scale and zero point and quantizes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from qtk.kernels.gpu.codes import SMALLEST_SCALE, grid_of, narrowed, quantize, rounded
from qtk.kernels.gpu.division import WIDE, limited, limited_quotient
from qtk.kernels.gpu.launch import Call, on_device_of, repeat, run_for, run_on_tiles
from qtk.kernels.gpu.statistics import min_max
from qtk.kernels.gpu.tiles import WARPS, is_dense, load, places, spread, store, tail, tile
from qtk.kernels.gpu.tiling import TILE, fitted, shifted, tiling_of
from qtk.numerics import dynamic
from qtk.numerics.ranges import LARGEST_REAL

WIDEST = 4 * TILE
"""Longest row, in elements, that one program loads as a whole."""


@triton.jit
def range_of(low, high, qmin, qmax, largest, SYMMETRIC: tl.constexpr):
    """Scale and zero point of a range [low, high] that holds 0 and no NaN; ``largest`` bounds the scale."""
    if SYMMETRIC:
        scale = tl.maximum(tl.div_rn(high, tl.zeros_like(high) + qmax), tl.div_rn(low, tl.zeros_like(low) + qmin))
    else:
        scale = tl.div_rn(high - low, tl.zeros_like(high) + (qmax - qmin))
    scale = tl.where(scale == 0.0, 1.0, limited(scale, SMALLEST_SCALE, largest))
    zero = tl.zeros_like(scale)
    if not SYMMETRIC:
        zero = limited(rounded(limited(qmin - tl.div_rn(low, scale), -WIDE, WIDE)), qmin, qmax)
    return scale, zero


@triton.jit
def rows_kernel(
    x_at, y_at, scale_at, zero_at, rows, width, qmin, qmax, largest,
    SYMMETRIC: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, SHIFT: tl.constexpr,
):
    """A tile of whole rows: ``WIDTH`` is at least their length, with a ``SHIFT`` its beginnings more."""
    along1, row, exists, _ = places(tl.program_id(0), rows, 0, 1, ROWS)
    offsets, masks = tile(0, along1, row, exists, 1, 1, rows, width, ROWS, WIDTH, False, False, SHIFT, False)
    x = load(x_at + offsets, masks, SHIFT).to(tl.float32)  # 0, outside of the tile, is in every range
    spoilt = tl.max(tl.where(x == x, 0.0, 1.0), 1)
    low = tl.min(tl.where(x < 0.0, x, 0.0), 1)
    high = tl.max(tl.where(x > 0.0, x, 0.0), 1)
    scale, zero = range_of(low, high, qmin, qmax, largest, SYMMETRIC)
    scale = tl.where(spoilt > 0.0, float("nan"), scale)
    zero = tl.where(spoilt > 0.0, qmin, zero)
    tl.store(scale_at + row, scale, mask=exists)
    if not SYMMETRIC:
        tl.store(zero_at + row, zero.to(tl.int32), mask=exists)
    _, _, by = grid_of(scale[:, None], zero[:, None], qmin, qmax, True)
    real = rounded(limited_quotient(x, by)) * scale[:, None]
    store(y_at + offsets, narrowed(real, y_at.dtype.element_ty), masks, SHIFT)


@triton.jit
def given_extremes_kernel(
    x_at, y_at, low_at, high_at, scale_at, zero_at, qmin, qmax, largest, s1, middle, s2, inner, step1, step2, turns,
    splits,
    SYMMETRIC: tl.constexpr, SCALES: tl.constexpr, REACH: tl.constexpr, COLUMNS: tl.constexpr, FLAT: tl.constexpr,
    SHIFT: tl.constexpr, TAIL: tl.constexpr,
):
    program = tl.program_id(0)
    along1, along2, exists, index = places(program // splits, s2, step1, step2, SCALES)
    lowest = tl.load(low_at + index, mask=exists, other=0.0)
    highest = tl.load(high_at + index, mask=exists, other=0.0)
    low, high = tl.where(lowest < 0.0, lowest, 0.0), tl.where(highest > 0.0, highest, 0.0)
    own_scale, own_zero = range_of(low, high, qmin, qmax, largest, SYMMETRIC)
    own_scale = tl.where(lowest == lowest, own_scale, float("nan"))
    own_zero = tl.where(lowest == lowest, own_zero, qmin)
    if program % splits == 0:
        tl.store(scale_at + index, own_scale, mask=exists)
        if not SYMMETRIC:
            tl.store(zero_at + index, own_zero.to(tl.int32), mask=exists)
    grid = grid_of(spread(own_scale, COLUMNS), spread(own_zero, COLUMNS), qmin, qmax, True)
    each = tl.cdiv(turns, splits)
    first = (program % splits) * each
    for turn in range(first, tl.minimum(first + each, turns)):
        offsets, masks = tile(
            turn, along1, along2, exists, s1, middle, s2, inner, SCALES, REACH, COLUMNS, FLAT, SHIFT, TAIL
        )
        quantize(x_at, y_at, y_at, offsets, masks, grid, -1, 0, 0, SHIFT)
    if TAIL:  # noqa: SIM102 - Triton compiles a branch on a constant apart
        if program % splits == splits - 1:
            offsets, masks = tail(inner)
            quantize(x_at, y_at, y_at, offsets, masks, grid, -1, 0, 0, 0)


def fake_quantize_dynamic(
    x: Tensor, block_size: Sequence[int], qmin: int, qmax: int, symmetric: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``qtk.numerics.dynamic.fake_quantize``."""
    result = torch.empty_like(x)
    scale = torch.empty(dynamic.scale_shape(x.shape, block_size), dtype=torch.float32, device=x.device)
    zero = scale.new_empty(0 if symmetric else scale.shape, dtype=torch.int32)
    likeness = x.get_device(), x.shape, x.stride(), x.dtype, tuple(block_size), qmin, qmax, symmetric
    call = Call(("dynamic", *likeness), (x, result, scale, zero))
    if repeat(call):
        return result, scale, zero
    tiling = tiling_of(x, block_size) if x.numel() and is_dense(x) else None
    if tiling is None and (x.is_contiguous() or not x.numel()):
        return dynamic.fake_quantize(x, block_size, qmin, qmax, symmetric)
    if tiling is None:
        flat, scale, zero = fake_quantize_dynamic(x.contiguous(), block_size, qmin, qmax, symmetric)
        return result.copy_(flat), scale, zero
    largest = LARGEST_REAL / (max(qmax, -qmin) if symmetric else qmax - qmin)
    codes = float(qmin), float(qmax), largest
    width = x.shape[-1] if x.ndim else 1
    one_a_row = x.is_contiguous() and scale.numel() * width == x.numel() > width and width <= WIDEST
    if one_a_row and tuple(block_size[:-1]) == (1,) * (x.ndim - 1):
        wide = triton.next_power_of_2(width)
        shift = shifted(tiling, x, result, light=True).shift
        shift = shift if width + max(shift - 1, 0) <= wide else 0  # in twice as many lanes, half would be idle
        together = max(1, TILE // wide)
        with on_device_of(x):
            run_for(
                call, rows_kernel, (triton.cdiv(scale.numel(), together),),
                x, result, scale, zero, scale.numel(), width, *codes, SYMMETRIC=symmetric, ROWS=together, WIDTH=wide,
                SHIFT=shift, num_warps=WARPS,
            )
    else:
        low, high = min_max(x, block_size, scale.numel())
        run_on_tiles(
            None, given_extremes_kernel, fitted(tiling, x, result), x, result, low, high, scale, zero, *codes,
            SYMMETRIC=symmetric,
        )
    return result, scale, zero
