"""Division of many elements by the scale they share: the quotient that a division rounds to, without dividing.

    inverse = fl(1 / scale)                                     once a scale
    near    = fl(x · inverse)
    quotient = fl(near + fl(x − near · scale) · inverse)        two fused multiply-adds

This is fl(x / scale), the correctly rounded quotient of float32, while nothing under- or overflows: Brisebarre, Muller
and Raina 2004, "Accelerating Correctly Rounded Floating-Point Division When the Divisor Is Known in Advance", after
Markstein 1990. ``tests/kernels/gpu/test_division.py`` computes every case in which it could fail. So that nothing does,

- no effective scale is below ``SMALLEST_SCALE``, and the numbers that codes stand for are finite (``choose_range``);
  a quotient may be inexact where it is less than half of the smallest number above 0, and rounds to 0;
- ``near`` is limited, so that infinities make no NaN; or ``x`` is, instead of its code afterwards: to
  [low, high] · scale, where quotients are low and high within an ulp. As rounding is monotonic, what it then rounds to
  is what the division's quotient rounds to, limited to [low, high].

A division takes ten instructions of an NVIDIA GPU for every element, among them a branch around its slow path.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")

WIDE = tl.constexpr(4194304.0)
"""2²²: more than a code has, and rounded by adding a number (``codes.rounded``)."""


@triton.jit
def fused(one, other, added):
    """Computes one · other + added, rounded once. Triton's interpreter would round twice."""
    if INTERPRETED:
        result = (one.to(tl.float64) * other.to(tl.float64) + added.to(tl.float64)).to(tl.float32)
    else:
        result = tl.fma(one, other, added)
    return result


@triton.jit
def limited(value, low, high):
    """``value`` limited to [low, high]. Keeps NaN."""
    return tl.clamp(value, low, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def divisor(scale, low, high):
    """What the quotients by a scale take, computed once: the scale, its inverse, and the numbers of the ends.

    ``low`` and ``high``, the ends, are integers or minifloats of at most 2²².
    """
    return scale, tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale), scale * low, scale * high


@triton.jit
def limited_quotient(x, by):
    """The quotient x / scale, limited within an ulp to the ends of its divisor. Keeps NaN; the sign of 0 is lost."""
    _, inverse, least, most = by
    x = limited(x, least, most)
    return corrected(x, x * inverse, by)


@triton.jit
def quotient(x, by):
    """The quotient x / scale; beyond 2²² anything that is beyond it, too. Keeps NaN; the sign of 0 is lost."""
    _, inverse, _, _ = by
    return corrected(x, limited(x * inverse, -WIDE, WIDE), by)


@triton.jit
def corrected(x, near, by):
    """The quotient by the one that is near."""
    scale, inverse, _, _ = by
    return fused(fused(-near, scale, x), inverse, near)
