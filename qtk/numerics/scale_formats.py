"""Scales of blocks that are themselves stored in few bits: powers of two, small floats, small integers.

Each function gives the float32 scales that the stored ones stand for; fake-quantizing with these, in blocks, is the
format: MX is ``power_of_two`` and blocks of 32, NVFP4 is ``float8`` and blocks of 16 with ``fp4_e2m1``, LPBQ is
``integer_multiples`` and int4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qtk.core.dtypes import DTYPES, FloatDtype
from qtk.errors import SpecError
from qtk.numerics.minifloat import round_to

MXINT8_UNIT = 2.0**-6
"""MXINT8 elements are int8 times this: codes of scale ``power_of_two(amax, 0) * MXINT8_UNIT``."""

_E4M3 = DTYPES["fp8_e4m3"]
assert isinstance(_E4M3, FloatDtype)
SMALLEST_E4M3 = 2.0**-9
LARGEST_E4M3 = _E4M3.maximum
LARGEST_E2M1 = DTYPES["fp4_e2m1"].maximum


def largest_exponent(format: FloatDtype) -> int:
    """Exponent of the largest number of a format.

    >>> [largest_exponent(DTYPES[name]) for name in ("fp8_e4m3", "fp8_e5m2", "fp6_e3m2", "fp6_e2m3", "fp4_e2m1")]
    [8, 15, 4, 2, 2]
    """
    return int(torch.frexp(torch.tensor(format.largest)).exponent) - 1


def power_of_two(amax: Tensor, element_exponent: int) -> Tensor:
    """MX scales: ``2^(⌊log2 amax⌋ - element_exponent)``, exponents -127…127 (E8M0); NaN where ``amax`` is not finite.

    OCP Microscaling Formats 1.0, section 6.3.

    Shape: ``amax``, the largest magnitude of each block, float32, any; result alike.

    >>> power_of_two(torch.tensor([6.0, 1.0, 0.0]), 2).tolist()
    [1.0, 0.25, 0.125]
    """
    exponent = torch.frexp(amax).exponent - 1 - element_exponent
    scale = torch.ldexp(torch.ones_like(amax), exponent.clamp(-127, 127))
    return torch.where(amax.isfinite(), scale, torch.nan)


def float8(amax: Tensor, tensor_amax: Tensor) -> tuple[Tensor, Tensor]:
    """NVFP4 scales: E4M3 numbers times one float32 scale of the tensor, by which both kinds of scale are used whole.

    ``tensor_scale = tensor_amax / (448 · 6)``, ``stored = e4m3(amax / 6 / tensor_scale)``, at least 2⁻⁹. A tensor of
    zeros has tensor scale 1.

    Shape: ``amax``, the largest magnitude of each block, float32, any; ``tensor_amax`` []; the scales as ``amax``, and
    the tensor scale [].

    >>> scale, tensor_scale = float8(torch.tensor([26.88, 2.688]), torch.tensor(26.88))
    >>> (scale / tensor_scale).tolist()
    [448.0, 44.0]
    """
    tensor_scale = torch.where(tensor_amax > 0, tensor_amax / (LARGEST_E4M3 * LARGEST_E2M1), 1.0)
    assert isinstance(_E4M3, FloatDtype)
    stored = round_to(amax / LARGEST_E2M1 / tensor_scale, _E4M3).clamp(min=SMALLEST_E4M3)
    return stored * tensor_scale, tensor_scale


def integer_multiples(scale: Tensor, axis: int, *, bits: int) -> tuple[Tensor, Tensor]:
    """LPBQ scales: integers 1…2^bits times one float32 scale along ``axis``.

    ``channel_scale = max(scale) / 2^bits`` over all blocks of an index of ``axis``, ``stored = clamp(round(scale /
    channel_scale), 1, 2^bits)``: low power blockwise quantization; int4 codes times ``bits=4`` fit int8.

    Shape: ``scale``, those of the blocks, float32, [..., axis, ...]; the scales alike, and the channel scale with every
    other axis of length 1.

    Raises: SpecError if ``bits`` is not 1…8.

    >>> scale, channel_scale = integer_multiples(torch.tensor([[1.6, 0.84, 0.01]]), 0, bits=4)
    >>> (scale / channel_scale).round().tolist(), round(float(channel_scale), 6)
    ([[16.0, 8.0, 1.0]], 0.1)
    """
    if not 1 <= bits <= 8:
        raise SpecError(f"bits of integer scales must be 1 to 8, got {bits}")
    others = [other for other in range(scale.ndim) if other != axis % scale.ndim]
    channel_scale = scale.amax(others, keepdim=True) / (1 << bits)
    return (scale / channel_scale).round().clamp(1, 1 << bits) * channel_scale, channel_scale
