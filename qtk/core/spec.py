"""The question a quantizer answers: which codes, scales shared how, around which zero."""

from __future__ import annotations

from dataclasses import dataclass

from qtk.core.dtypes import FloatDtype, QDtype, dtype
from qtk.core.granularity import Granularity, PerBlock, PerChannel, PerTensor
from qtk.errors import SpecError

PER_TENSOR = PerTensor()


@dataclass(frozen=True, slots=True)
class QuantSpec:
    """How a tensor is to be quantized; numbers come later, as an ``Encoding``.

    Args:
        dtype: the format of the codes; a small float is symmetric and has no narrow range.
        granularity: which elements share a scale.
        symmetric: the zero point is 0 and not stored.
        narrow_range: leave the lowest code out (int8: -127…127).
        dynamic: the range is taken from each tensor at run time.

    >>> spec = QuantSpec(dtype("int8"), PerChannel(0), symmetric=True)
    >>> spec.qmin, spec.qmax
    (-128, 127)
    """

    dtype: QDtype
    granularity: Granularity = PER_TENSOR
    symmetric: bool = False
    narrow_range: bool = False
    dynamic: bool = False

    def __post_init__(self) -> None:
        if self.symmetric and not self.dtype.signed:
            raise SpecError(f"a symmetric spec needs a signed dtype, got {self.dtype}; use int{self.dtype.bits}")
        if isinstance(self.dtype, FloatDtype) and (not self.symmetric or self.narrow_range):
            raise SpecError(f"{self.dtype} has neither a zero point nor a narrow range; use symmetric=True, "
                            "narrow_range=False, or an integer format")
        if self.dynamic:
            raise SpecError("dynamic=True is not built yet; use a calibrated (static) spec")

    @property
    def qmin(self) -> float:
        return self.dtype.minimum + (1 if self.narrow_range else 0)

    @property
    def qmax(self) -> float:
        return self.dtype.maximum

    def to_json(self) -> dict[str, object]:
        match self.granularity:
            case PerTensor():
                granularity: object = "per_tensor"
            case PerChannel(axis):
                granularity = {"per_channel": axis}
            case PerBlock(sizes):
                granularity = {"per_block": list(sizes)}
        return {
            "dtype": self.dtype.name,
            "granularity": granularity,
            "symmetric": self.symmetric,
            "narrow_range": self.narrow_range,
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
            } if not rest:
                pass
            case _:
                raise SpecError(f"not a quantization spec: {data}")
        match raw:
            case "per_tensor":
                granularity: Granularity = PerTensor()
            case {"per_channel": int(axis)}:
                granularity = PerChannel(axis)
            case {"per_block": list(sizes)} if all(isinstance(size, int) for size in sizes):
                granularity = PerBlock(tuple(sizes))
            case _:
                raise SpecError(f"unknown granularity {raw!r}; use 'per_tensor', {{'per_channel': axis}} or "
                                "{'per_block': sizes}")
        return cls(dtype(name), granularity, symmetric=symmetric, narrow_range=narrow_range)

    def __str__(self) -> str:
        words = [self.dtype.name, str(self.granularity), "symmetric" if self.symmetric else "asymmetric"]
        if self.narrow_range:
            words.append("narrow")
        return " ".join(words)
