"""Device functions that compute codes, real values, residuals and gradients of the elements of a tile.

Formulas of ``qtk.numerics.affine``, ``minifloat``, ``straight_through``, ``residual`` and ``effective``, in float32.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

from qtk.kernels.gpu.tiles import load, store

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
"""Triton's interpreter truncates to bfloat16; GPUs round."""


@triton.jit
def rounded(value):
    """Rounds to the nearest integer, ties to even; for |value| ≤ 2²². Keeps NaN."""
    return (value + 12582912.0) - 12582912.0


@triton.jit
def clamped(value, low, high):
    """``value`` limited to [low, high]. Keeps NaN."""
    value = tl.where(value < low, low, value)
    return tl.where(value > high, high, value)


@triton.jit
def narrowed(value, kind: tl.constexpr):
    """``value`` in another float format, ties to even."""
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
    return tl.where(size < 1.1754943508222875e-38, 1.1754943508222875e-38, size)


@triton.jit
def effective_zero_point(zero_at, index, exists, qmin, qmax):
    """As ``qtk.numerics.effective.effective_zero_point``, loaded from memory as float32."""
    return rounded(clamped(tl.load(zero_at + index, mask=exists, other=0).to(tl.float32), qmin, qmax))


@triton.jit
def code_of(steps, zero):
    """``round(steps) + zero`` before clamping to [qmin, qmax]; exact for |steps| ≤ 2²²."""
    return rounded(clamped(steps, -4194304.0, 4194304.0)) + zero


@triton.jit
def number_of(steps, zero, MANTISSA: tl.constexpr, SMALLEST: tl.constexpr):
    """The integer code, or ``steps`` rounded to a minifloat with ``MANTISSA`` mantissa bits, before clamping.

    ``MANTISSA`` of -1 means integers. ``SMALLEST`` is the biased float32 exponent of the smallest normal minifloat.
    """
    if MANTISSA < 0:
        number = code_of(steps, zero)
    else:
        steps = clamped(steps, -1e30, 1e30)  # beyond every minifloat, yet 1 / unit does not underflow
        exponent = tl.maximum(steps.to(tl.int32, bitcast=True) & 0x7F800000, SMALLEST << 23)
        unit = exponent - (MANTISSA << 23)
        inverse = ((254 << 23) - unit).to(tl.float32, bitcast=True)  # exact: unit is a power of two
        size = rounded(tl.abs(steps * inverse)) * unit.to(tl.float32, bitcast=True)
        sign = steps.to(tl.uint32, bitcast=True) & 0x80000000  # a minifloat has -0
        number = (size.to(tl.uint32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    return number


@triton.jit
def residual_of(x, distance, code, nearest, RESIDUAL: tl.constexpr):
    """As ``qtk.numerics.residual``, for a fixed range if ``RESIDUAL`` is 8, else for a learned one."""
    inside = code == nearest
    if RESIDUAL == 8:
        positive = tl.where(x <= 0, 0, 1)
        residual = tl.where(inside, positive, 3 * positive - 1).to(tl.int8)
    else:
        units = rounded(tl.where(inside, distance, 0.0) * 65530.0).to(tl.int32)
        outside = tl.where(code < nearest, -32768, tl.where(code > nearest, 32767, -32767))
        residual = tl.where(inside, tl.where(x == 0, 32766, units), outside).to(tl.int16)
    return residual


@triton.jit
def quantize(
    x_at, y_at, residual_at, offsets, masks, scale, zero, qmin, qmax,
    MANTISSA: tl.constexpr, SMALLEST: tl.constexpr, RESIDUAL: tl.constexpr, SHIFT: tl.constexpr,
):
    """Fake-quantizes the elements of a tile."""
    x = load(x_at + offsets, masks, SHIFT).to(tl.float32)
    steps = tl.div_rn(x, scale)
    code = number_of(steps, zero, MANTISSA, SMALLEST)
    nearest = clamped(code, qmin, qmax)
    store(y_at + offsets, narrowed((nearest - zero) * scale, y_at.dtype.element_ty), masks, SHIFT)
    if RESIDUAL:
        residual = residual_of(x, (nearest - zero) - steps, code, nearest, RESIDUAL)
        store(residual_at + offsets, residual, masks, SHIFT)


@triton.jit
def gradient(
    x_at, g_at, dx_at, offsets, masks, scale, zero, qmin, qmax,
    MANTISSA: tl.constexpr, SMALLEST: tl.constexpr, RESIDUAL: tl.constexpr, SHIFT: tl.constexpr,
):
    """Stores the gradient of the elements of a tile. Returns: that of the result, which are inside, their error."""
    g = load(g_at + offsets, masks, SHIFT)
    error = 0.0
    if RESIDUAL:
        residual = load(x_at + offsets, masks, SHIFT).to(tl.int32)
        if RESIDUAL == 8:
            inside = (residual >> 1) == 0
        else:
            inside = (residual > -32767) & (residual < 32767)
            limit = tl.where(residual == 32767, qmax - zero, float("nan"))
            limit = tl.where(residual == -32768, qmin - zero, limit)
            distance = tl.where(residual == 32766, 0, residual).to(tl.float32) * (1 / 65530)
            error = tl.where(inside, distance, limit)
    else:
        steps = tl.div_rn(load(x_at + offsets, masks, SHIFT).to(tl.float32), scale)
        code = number_of(steps, zero, MANTISSA, SMALLEST)
        nearest = clamped(code, qmin, qmax)
        inside = nearest == code
        error = (nearest - zero) - tl.where(inside, steps, 0.0)
    store(dx_at + offsets, tl.where(inside, g, 0.0).to(dx_at.dtype.element_ty), masks, SHIFT)
    return g, inside, error
