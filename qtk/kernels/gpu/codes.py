"""Device functions that compute codes, real values, residuals and gradients of the elements of a tile.

Formulas of ``qtk.numerics.affine``, ``minifloat``, ``straight_through``, ``residual`` and ``effective``, in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qtk.kernels.gpu.division import INTERPRETED, WIDE, divisor, limited, limited_quotient, quotient
from qtk.kernels.gpu.tiles import load, spread, store
from qtk.numerics import effective

SMALLEST_SCALE = tl.constexpr(effective.SMALLEST_SCALE)


@triton.jit
def rounded(value):
    """Rounds to the nearest integer, ties to even; for |value| ≤ 2²². Keeps NaN."""
    return (value + 12582912.0) - 12582912.0


@triton.jit
def narrowed(value, kind: tl.constexpr):
    """``value`` in another float format, ties to even. Triton's interpreter would truncate to bfloat16."""
    if INTERPRETED and kind == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        result = tl.where(value == value, nearest, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        result = value.to(kind)
    return result


@triton.jit
def effective_scale(scale):
    """As ``qtk.numerics.effective.effective_scale``."""
    size = tl.abs(scale)
    return tl.where(size < SMALLEST_SCALE, SMALLEST_SCALE, size)


@triton.jit
def effective_zero_point(zero_at, index, exists, qmin, qmax):
    """As ``qtk.numerics.effective.effective_zero_point``, loaded from memory as float32."""
    return rounded(limited(tl.load(zero_at + index, mask=exists, other=0).to(tl.float32), qmin, qmax))


@triton.jit
def number_of(x, steps, MANTISSA: tl.constexpr, SMALLEST: tl.constexpr):
    """``steps``, the quotient of ``x``, rounded to an integer, or to a minifloat with ``MANTISSA`` mantissa bits.

    ``MANTISSA`` of -1 means integers. ``SMALLEST`` is the biased float32 exponent of the smallest normal minifloat.
    """
    if MANTISSA < 0:
        number = rounded(steps)
    else:
        exponent = tl.maximum(steps.to(tl.int32, bitcast=True) & 0x7F800000, SMALLEST << 23)
        unit = exponent - (MANTISSA << 23)
        inverse = ((254 << 23) - unit).to(tl.float32, bitcast=True)  # exact: unit is a power of two
        size = rounded(tl.abs(steps * inverse)) * unit.to(tl.float32, bitcast=True)
        sign = x.to(tl.uint32, bitcast=True) & 0x80000000  # a minifloat has -0
        number = (size.to(tl.uint32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    return number


@triton.jit
def grid_of(scale, zero, qmin, qmax, IS_LIMITED: tl.constexpr):
    """The grid of a scale: its ends in steps from the zero point, and the divisor, whose first number is the scale.

    ``IS_LIMITED``: what is beyond the ends counts as them, so that nobody learns that it is.
    """
    low, high = qmin - zero, qmax - zero
    by = divisor(scale, low, high) if IS_LIMITED else divisor(scale, -WIDE, WIDE)
    return low, high, by


@triton.jit
def range_at(scale_at, zero_at, index, exists, qmin, qmax, ASYMMETRIC: tl.constexpr):
    """Effective scales and zero points, loaded from memory, in the shape of ``index``."""
    scale = effective_scale(tl.load(scale_at + index, mask=exists, other=1.0))
    zero = tl.zeros_like(scale)
    if ASYMMETRIC:
        zero = effective_zero_point(zero_at, index, exists, qmin, qmax)
    return scale, zero


@triton.jit
def grid_at(
    scale_at, zero_at, index, exists, qmin, qmax, ASYMMETRIC: tl.constexpr, COLUMNS: tl.constexpr,
    IS_LIMITED: tl.constexpr,
):
    """The grids of the scales of a tile, loaded from memory, in a shape that broadcasts against the tile."""
    scale, zero = range_at(scale_at, zero_at, index, exists, qmin, qmax, ASYMMETRIC)
    return grid_of(spread(scale, COLUMNS), spread(zero, COLUMNS), qmin, qmax, IS_LIMITED)


@triton.jit
def residual_of(x, steps, number, nearest, RESIDUAL: tl.constexpr):
    """As ``qtk.numerics.residual``, for a fixed range if ``RESIDUAL`` is 8, else for a learned one."""
    inside = number == nearest
    if RESIDUAL == 8:
        positive = tl.where(x <= 0, 0, 1)
        residual = tl.where(inside, positive, 3 * positive - 1).to(tl.int8)
    else:
        units = rounded(tl.where(inside, nearest - steps, 0.0) * 65530.0).to(tl.int32)
        outside = tl.where(number < nearest, -32768, tl.where(number > nearest, 32767, -32767))
        residual = tl.where(inside, tl.where(x == 0, 32766, units), outside).to(tl.int16)
    return residual


@triton.jit
def quantize(
    x_at, y_at, residual_at, offsets, masks, grid,
    MANTISSA: tl.constexpr, SMALLEST: tl.constexpr, RESIDUAL: tl.constexpr, SHIFT: tl.constexpr,
):
    """Fake-quantizes the elements of a tile. ``grid``: of ``grid_of``, limited if there is no residual."""
    low, high, by = grid
    x = load(x_at + offsets, masks, SHIFT).to(tl.float32)
    steps = quotient(x, by) if RESIDUAL else limited_quotient(x, by)
    number = number_of(x, steps, MANTISSA, SMALLEST)
    nearest = limited(number, low, high) if RESIDUAL else number
    store(y_at + offsets, narrowed(nearest * by[0], y_at.dtype.element_ty), masks, SHIFT)
    if RESIDUAL:
        store(residual_at + offsets, residual_of(x, steps, number, nearest, RESIDUAL), masks, SHIFT)


@triton.jit
def gradient(
    x_at, g_at, dx_at, offsets, masks, grid,
    MANTISSA: tl.constexpr, SMALLEST: tl.constexpr, RESIDUAL: tl.constexpr, SHIFT: tl.constexpr,
):
    """Stores the gradient of the elements of a tile. Returns: gradient of the result, which are inside, their error.

    ``grid``: of ``grid_of``, not limited.
    """
    low, high, by = grid
    g = load(g_at + offsets, masks, SHIFT)
    error = 0.0
    if RESIDUAL:
        residual = load(x_at + offsets, masks, SHIFT).to(tl.int32)
        if RESIDUAL == 8:
            inside = (residual >> 1) == 0
        else:
            inside = (residual > -32767) & (residual < 32767)
            limit = tl.where(residual == 32767, high, float("nan"))
            limit = tl.where(residual == -32768, low, limit)
            distance = tl.where(residual == 32766, 0, residual).to(tl.float32) * (1 / 65530)
            error = tl.where(inside, distance, limit)
    else:
        x = load(x_at + offsets, masks, SHIFT).to(tl.float32)
        steps = quotient(x, by) if MANTISSA < 0 else limited_quotient(x, by)  # no minifloat is made of an infinity
        number = number_of(x, steps, MANTISSA, SMALLEST)
        nearest = limited(number, low, high)
        inside = nearest == number
        error = nearest - tl.where(inside, steps, 0.0)
    store(dx_at + offsets, tl.where(inside, g, 0.0).to(dx_at.dtype.element_ty), masks, SHIFT)
    return g, inside, error
