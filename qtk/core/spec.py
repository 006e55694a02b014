"""How a tensor is quantized: number format, granularity, symmetry."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from qtk.core.dtypes import FloatDtype, QDtype, dtype
from qtk.core.granularity import Granularity, PerBlock, PerChannel, PerTensor, PerToken, PerTokenBlock
from qtk.errors import SpecError
from qtk.public import public

PER_TENSOR = PerTensor()

REDUCED_CODE = 64
"""The largest magnitude of a code in a reduced range."""


class ScaleFormat(enum.Enum):
    """The format of block scales that are not stored as float32; formulas in ``qtk.numerics.scale_formats``."""

    E8M0 = "e8m0"
    """Powers of two, as in OCP MX formats."""
    E4M3 = "e4m3"
    """FP8 E4M3 times one float32 scale of the tensor, as in NVFP4."""
    INT4 = "int4"
    """Integers 1…16 times one float32 scale per output channel, as in LPBQ."""


@public
@dataclass(frozen=True, slots=True)
class QuantSpec:
    """Says how a tensor is quantized; scale and zero point come later, in an ``Encoding``.

    Args:
        dtype: the format of the codes; a small float is symmetric and has no narrow range.
        granularity: which elements share a scale.
        symmetric: the zero point is not stored: it is 0, or the middle code of an unsigned format (uint8: 128).
        narrow_range: exclude the lowest code (int8: -127…127).
        reduced_range: use the inner half of signed 8 bit codes, -64…64: two products of such with uint8 add up to no
            more than 2 · 255 · 64 = 32,640, which x86 without VNNI holds in the int16 it adds them in.
        dynamic: dynamic quantization: each tensor, each of its rows (``PerToken``) or blocks (``PerTokenBlock``), has
            its own range at run time.
        scale_format: how the scales of blocks are stored; ``None``: as float32. Of ``PerTokenBlock`` and E4M3 without
            ``dynamic``, the calibrated scale belongs to the largest block: 448 times the scale of the tensor.

    >>> spec = QuantSpec(dtype("int8"), PerChannel(0), symmetric=True)
    >>> spec.qmin, spec.qmax
    (-128, 127)
    >>> spec = QuantSpec(dtype("uint8"), symmetric=True)
    >>> spec.qmin, spec.qmax, spec.middle_code
    (-128, 127, 128)
    """

    dtype: QDtype
    granularity: Granularity = PER_TENSOR
    symmetric: bool = False
    narrow_range: bool = False
    reduced_range: bool = False
    dynamic: bool = False
    scale_format: ScaleFormat | None = None

    def __post_init__(self) -> None:
        if self.reduced_range and (self.dtype.name != "int8" or self.narrow_range):
            raise SpecError(f"a reduced range is -{REDUCED_CODE}…{REDUCED_CODE} of int8, got {self.dtype} with "
                            f"narrow_range={self.narrow_range}; use int8 and narrow_range=False, or leave it out")
        if isinstance(self.dtype, FloatDtype) and (not self.symmetric or self.narrow_range):
            raise SpecError(f"{self.dtype} has neither a zero point nor a narrow range; use symmetric=True, "
                            "narrow_range=False, or an integer format")
        in_blocks = (PerBlock,) if self.scale_format is ScaleFormat.INT4 else (PerBlock, PerTokenBlock)
        if self.scale_format is not None and not (self.symmetric and isinstance(self.granularity, in_blocks)):
            raise SpecError(f"scales stored as {self.scale_format.value} need symmetric blocks; use "
                            "symmetric=True and PerBlock(sizes), or leave scale_format out")
        if self.dynamic and self.middle_code:
            raise SpecError(f"dynamic quantization has no symmetric {self.dtype}; use int{self.dtype.bits}, or "
                            "symmetric=False")
        if self.dynamic and not isinstance(self.granularity, PerTensor | PerToken | PerTokenBlock):
            raise SpecError(f"dynamic quantization is per tensor, per token or in blocks of these, got "
                            f"{self.granularity}; use one of these, or leave dynamic out")
        if isinstance(self.granularity, PerToken) and not self.dynamic:
            raise SpecError("PerToken() is for dynamic quantization: the number of tokens varies; use dynamic=True")
        if isinstance(self.granularity, PerTokenBlock) and not self.dynamic and self.scale_format != ScaleFormat.E4M3:
            raise SpecError(f"{self.granularity} has a calibrated scale beside scales of blocks only if these are "
                            "e4m3; use dynamic=True")

    @property
    def middle_code(self) -> int:
        """The zero point of a symmetric spec; 0 of an asymmetric one, which stores its own."""
        return 1 << (self.dtype.bits - 1) if self.symmetric and not self.dtype.signed else 0

    @property
    def qmin(self) -> float:
        """The lowest code; of a symmetric spec, counted from its zero point."""
        if self.reduced_range:
            return -REDUCED_CODE
        return self.dtype.minimum - self.middle_code + (1 if self.narrow_range else 0)

    @property
    def qmax(self) -> float:
        """The highest code; of a symmetric spec, counted from its zero point."""
        return REDUCED_CODE if self.reduced_range else self.dtype.maximum - self.middle_code

    def to_json(self) -> dict[str, object]:
        match self.granularity:
            case PerTensor():
                granularity: object = "per_tensor"
            case PerToken():
                granularity = "per_token"
            case PerChannel(axis):
                granularity = {"per_channel": int(axis)}
            case PerBlock(sizes):
                granularity = {"per_block": list(sizes)}
            case PerTokenBlock(length, axis):
                granularity = {"per_token_block": [length, axis]}
        return {
            "dtype": self.dtype.name,
            "granularity": granularity,
            "symmetric": self.symmetric,
            "narrow_range": self.narrow_range,
            **({"reduced_range": True} if self.reduced_range else {}),
            **({"dynamic": True} if self.dynamic else {}),
            **({} if self.scale_format is None else {"scale_format": self.scale_format.value}),
        }

    @classmethod
    def from_json(cls, data: dict[str, object]) -> QuantSpec:
        """Inverse of ``to_json``. Raises: SpecError on a malformed record."""
        match data:
            case {
                "dtype": str(name),
                "granularity": raw,
                "symmetric": bool(symmetric),
                "narrow_range": bool(narrow_range),
                **rest,
            } if rest.keys() <= {"dynamic", "scale_format", "reduced_range"} and all(
                isinstance(rest.get(key, False), bool) for key in ("dynamic", "reduced_range")
            ):
                stored = rest.get("scale_format")
                dynamic, reduced = (bool(rest.get(key)) for key in ("dynamic", "reduced_range"))
            case _:
                raise SpecError(f"not a quantization spec: {data}")
        match raw:
            case "per_tensor":
                granularity: Granularity = PerTensor()
            case "per_token":
                granularity = PerToken()
            case {"per_channel": int(axis)}:
                granularity = PerChannel(axis)
            case {"per_block": list(sizes)} if all(isinstance(size, int) for size in sizes):
                granularity = PerBlock(tuple(sizes))
            case {"per_token_block": [int(length), int(axis)]}:
                granularity = PerTokenBlock(length, axis)
            case _:
                raise SpecError(f"unknown granularity {raw!r}; use 'per_tensor', 'per_token', {{'per_channel': axis}}, "
                                "{'per_block': sizes} or {'per_token_block': [length, axis]}")
        known = [scale_format.value for scale_format in ScaleFormat]
        if stored is not None and stored not in known:
            raise SpecError(f"unknown scale_format {stored!r}; use one of {', '.join(known)}")
        return cls(dtype(name), granularity, symmetric=symmetric, narrow_range=narrow_range,
                   reduced_range=reduced, dynamic=dynamic, scale_format=None if stored is None else ScaleFormat(stored))

    def __str__(self) -> str:
        words = [self.dtype.name, str(self.granularity), "symmetric" if self.symmetric else "asymmetric"]
        if self.narrow_range:
            words.append("narrow")
        if self.reduced_range:
            words.append("reduced")
        if self.dynamic:
            words.append("dynamic")
        if self.scale_format is not None:
            words.append(f"{self.scale_format.value} scales")
        return " ".join(words)
