"""Block scales that are themselves quantized: powers of two (MX), E4M3 (NVFP4), integer multiples (LPBQ).

Each function returns the dequantized scales in float32; fake-quantizing in blocks with these simulates the format: MX
is ``power_of_two`` and blocks of 32, NVFP4 is ``float8`` and blocks of 16 with ``fp4_e2m1``, LPBQ is
``integer_multiples`` and int4. ``run_time_scales`` finds the scales of activations.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qtk.core.dtypes import DTYPES, FloatDtype
from qtk.core.granularity import PerBlock, PerTokenBlock
from qtk.core.spec import QuantSpec, ScaleFormat
from qtk.errors import SpecError
from qtk.numerics.blocks import split_shape
from qtk.numerics.effective import SMALLEST_SCALE
from qtk.numerics.minifloat import round_to

_E4M3 = DTYPES["fp8_e4m3"]
assert isinstance(_E4M3, FloatDtype)
SMALLEST_E4M3 = 2.0**-9
LARGEST_E4M3 = _E4M3.maximum

HALVES = (torch.bfloat16, torch.float16)
"""Formats of 16 bits in which files hold scales: of scales in the first, most are in the second too."""


def rounded_to(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``scale`` as ``dtype`` holds it, no smaller than its smallest number.

    >>> rounded_to(torch.tensor([0.1, 1e-12]), torch.float16).tolist()
    [0.0999755859375, 5.960464477539063e-08]
    """
    info = torch.finfo(dtype)
    return scale.clamp(info.smallest_normal * info.eps, info.max).to(dtype).to(torch.float32)


def rounded_like(scale: Tensor, present: Tensor) -> Tensor:
    """``scale``, rounded to 16 bits where all of ``present`` are held in such a format (``qtk.round_scales``).

    >>> rounded_like(torch.tensor([0.1]), torch.tensor([0.5])).tolist()
    [0.10009765625]
    """
    held = (dtype for dtype in HALVES if torch.equal(rounded_to(present, dtype), present))
    dtype = next(held, None)
    return scale if dtype is None else rounded_to(scale, dtype)


def stored(amax: Tensor, scale: Tensor, spec: QuantSpec) -> Tensor:
    """Block scales rounded to ``spec.scale_format``. For INT4 the channel axis is the first one with blocks of 1.

    A block of zeros has scale 1 where the format allows it.

    Shape: ``amax``, the largest magnitude of each block, and ``scale``, as it would be stored in float32: float32, the
    qparam shape; result the same.
    """
    match spec.scale_format:
        case ScaleFormat.E8M0:
            if isinstance(spec.dtype, FloatDtype):  # of 8 bits one mantissa bit, as compressed-tensors and its servers
                mantissa_bits = 1 if spec.dtype.bits == 8 else spec.dtype.mantissa_bits
                return torch.where(amax == 0, 1.0, power_of_two(amax, largest_exponent(spec.dtype), mantissa_bits))
            # codes are fractions of [-2, 2), as in MXINT8
            return torch.where(amax == 0, 1.0, power_of_two(amax, 0) * 2.0 ** (2 - spec.dtype.bits))
        case ScaleFormat.E4M3 if isinstance(spec.granularity, PerTokenBlock):
            return scale
        case ScaleFormat.E4M3:
            return float8(amax, amax.max(), spec.qmax)[0]
        case ScaleFormat.INT4:
            sizes = spec.granularity.sizes if isinstance(spec.granularity, PerBlock) else ()
            axis = sizes.index(1) if 1 in sizes else 0
            return integer_multiples(torch.where(amax == 0, 0.0, scale), axis, bits=4)[0]
        case None:
            return scale


def candidates(scale: Tensor, fraction: Tensor, spec: QuantSpec) -> Tensor:
    """Candidate scales for a search, each of which ``spec.scale_format`` can store.

    E8M0: the powers of two from twice to an eighth of the scale. INT4: the scale itself and the integers 1…16 times a
    sixteenth of the channel's largest. E4M3: the fractions of the scale, rounded to E4M3 times the tensor scale.
    Float32: the fractions of the scale.

    Shape: ``scale`` float32, the qparam shape; ``fraction`` [candidates, *scale.shape], or of one element an axis;
    result [candidates, *scale.shape]. For E8M0 and INT4 the last candidate is ``scale`` itself.
    """
    match spec.scale_format:
        case ScaleFormat.E8M0:
            return torch.stack([scale * 2.0**shift for shift in (1, -1, -2, -3, 0)])
        case ScaleFormat.E4M3:
            assert isinstance(_E4M3, FloatDtype)
            tensor_scale = scale.max() / LARGEST_E4M3
            return round_to(scale * fraction / tensor_scale, _E4M3).clamp(min=SMALLEST_E4M3) * tensor_scale
        case ScaleFormat.INT4:
            sizes = spec.granularity.sizes if isinstance(spec.granularity, PerBlock) else ()
            axis = sizes.index(1) if 1 in sizes else 0
            others = [other for other in range(scale.ndim) if other != axis]
            unit = (scale.amax(others, keepdim=True) / 16).expand_as(scale)
            return torch.stack([*(unit * multiple for multiple in range(1, 17)), scale])
        case None:
            return scale * fraction


def largest_exponent(format: FloatDtype) -> int:
    """Exponent of the largest number of a format.

    >>> [largest_exponent(DTYPES[name]) for name in ("fp8_e4m3", "fp8_e5m2", "fp6_e3m2", "fp6_e2m3", "fp4_e2m1")]
    [8, 15, 4, 2, 2]
    """
    return int(torch.frexp(torch.tensor(format.largest)).exponent) - 1


def power_of_two(amax: Tensor, element_exponent: int, mantissa_bits: int | None = None) -> Tensor:
    """MX scales: ``2^(⌊log2 amax⌋ - element_exponent)``, exponents -127…127 (E8M0); NaN where ``amax`` is not finite.

    OCP Microscaling Formats 1.0, section 6.3. With ``mantissa_bits`` the exponent belongs to ``amax`` rounded to so
    many, ties up, so that the largest of a block is clipped by no more than its rounding: 7 with one bit is 8.

    Shape: ``amax``, the largest magnitude of each block, float32, any; result the same.

    >>> power_of_two(torch.tensor([7.0, 1.0, 0.0]), 2).tolist(), power_of_two(torch.tensor([7.0, 6.9]), 2, 1).tolist()
    ([1.0, 0.25, 0.125], [2.0, 1.0])
    """
    mantissa, whole = torch.frexp(amax)  # in [½, 1)
    exponent = whole - 1 - element_exponent
    if mantissa_bits is not None:
        exponent = exponent + (mantissa >= 1 - 2.0 ** -(mantissa_bits + 2)).to(exponent.dtype)
    scale = torch.ldexp(torch.ones_like(amax), exponent.clamp(-127, 127))
    return torch.where(amax.isfinite(), scale, torch.nan)


def float8(amax: Tensor, tensor_amax: Tensor, largest: float = 6.0) -> tuple[Tensor, Tensor]:
    """NVFP4 scales: E4M3 numbers times one float32 scale of the tensor.

    ``tensor_scale = tensor_amax / (448 · largest)``, ``stored = e4m3(amax / largest / tensor_scale)``, at least 2⁻⁹;
    ``largest`` is the largest number of the elements, 6 in E2M1. A tensor of zeros has tensor scale 1.

    Shape: ``amax``, the largest magnitude of each block, float32, any; ``tensor_amax`` []; the scales as ``amax``, and
    the tensor scale [].

    >>> scale, tensor_scale = float8(torch.tensor([26.88, 2.688]), torch.tensor(26.88))
    >>> (scale / tensor_scale).tolist()
    [448.0, 44.0]
    """
    tensor_scale = torch.where(tensor_amax > 0, tensor_amax / (LARGEST_E4M3 * largest), 1.0)
    assert isinstance(_E4M3, FloatDtype)
    small = round_to(amax / largest / tensor_scale, _E4M3).clamp(min=SMALLEST_E4M3)
    return small * tensor_scale, tensor_scale


def run_time_scales(x: Tensor, sizes: Sequence[int], spec: QuantSpec, scale: Tensor | None) -> Tensor:
    """The scales of the blocks of an activation in MX or NVFP4, as the library compressed-tensors 0.20 computes them.

    MX: as ``stored``. NVFP4, with ``divisor = 448 / scale``, of a dynamic spec ``448 · 6 / max|x|``:
    ``e4m3(divisor · (amax / 6)) / divisor``, the quotient by 6 rounded to the dtype of ``x``. A block that would have
    scale 0 gets 0.125 / divisor, with which its codes are 0.

    Shape: ``x`` any, with whole blocks of ``sizes``; ``scale`` [1], the calibrated one; result float32, one a block.

    >>> from qtk.core.granularity import PerTokenBlock
    >>> nvfp4 = QuantSpec(DTYPES["fp4_e2m1"], PerTokenBlock(2, -1), symmetric=True, scale_format=ScaleFormat.E4M3)
    >>> run_time_scales(torch.tensor([26.88, 1.0, 2.688, 0.0]), (2,), nvfp4, torch.tensor([4.48])).tolist()
    [4.480000019073486, 0.4399999976158142]
    """
    split, inside = split_shape(x.shape, sizes)
    shape = [length // size for length, size in zip(x.shape, sizes, strict=True)]
    amax = x.reshape(split).abs().amax(inside).reshape(shape) if inside else x.abs()
    if spec.scale_format is not ScaleFormat.E4M3:
        amax = amax.to(torch.float32)
        return stored(amax, amax, spec)
    if scale is None:
        largest = amax.amax().to(torch.float32)
        divisor = torch.where(largest > 0, LARGEST_E4M3 * spec.qmax / largest.clamp(min=SMALLEST_SCALE), 1.0)  # finite
    else:
        divisor = LARGEST_E4M3 / scale
    assert isinstance(_E4M3, FloatDtype)
    small = round_to((amax / spec.qmax).to(torch.float32) * divisor, _E4M3)
    return torch.where(small == 0, 0.125, small) / divisor


def tensor_scale_of(scale: Tensor) -> Tensor | None:
    """The float32 scale of the tensor by which all of its NVFP4 scales are E4M3 numbers: the smallest such, if any.

    Shape: ``scale`` float32, any; result [].

    >>> scale, tensor_scale = float8(torch.tensor([26.8, 2.7, 0.3]), torch.tensor(26.8))
    >>> torch.equal(tensor_scale_of(scale), tensor_scale)
    True
    """
    numbers = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32).flip(0)
    largest = scale.max()
    for number in numbers.to(scale.device):
        for step in (0, -1, 1, -2, 2):  # the quotient is rounded
            unit: Tensor = ((largest / number).reshape(1).view(torch.int32) + step).view(torch.float32)[0]
            if torch.equal((scale / unit).to(torch.float8_e4m3fn).to(torch.float32) * unit, scale):
                return unit
    return None


def integer_multiples(scale: Tensor, axis: int, *, bits: int) -> tuple[Tensor, Tensor]:
    """LPBQ scales: integers 1…2^bits times one float32 scale along ``axis``.

    ``channel_scale = max(scale) / 2^bits`` over all blocks of an index of ``axis``, ``stored = clamp(round(scale /
    channel_scale), 1, 2^bits)``: low power blockwise quantization; int4 codes times ``bits=4`` fit int8.

    Shape: ``scale`` of the blocks, float32, [..., axis, ...]; the stored scales the same, the channel scale with every
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
    channel_scale = torch.where(channel_scale == 0, 1.0, channel_scale)
    return (scale / channel_scale).round().clamp(1, 1 << bits) * channel_scale, channel_scale
