"""An encoding: the scale and zero point that a tensor is quantized with, and many of them moved to another device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qtk.core.spec import QuantSpec
from qtk.errors import EncodingError
from qtk.public import public


@public
@dataclass(frozen=True, slots=True, eq=False)
class Encoding:
    """Scale and zero point of a quantized tensor: ``x ≈ (code - zero_point) * scale``.

    Shape: ``scale`` float32 of ``spec.granularity.qparam_shape(x.shape)``; ``zero_point`` int32 of the same
    shape, ``None`` exactly when the spec is symmetric.

    Raises: EncodingError if the spec is dynamic, a shape or dtype is off, a scale is not finite and
    positive, or a zero point lies outside the codes.
    """

    spec: QuantSpec
    scale: Tensor
    zero_point: Tensor | None = None

    def __post_init__(self) -> None:
        if self.spec.dynamic:
            raise EncodingError(f"{self.spec} finds a range for each tensor at run time, so it has no encoding")
        if self.scale.dtype != torch.float32 or self.scale.ndim == 0:
            raise EncodingError(f"scale must be float32 with at least one axis, got {self.scale.dtype} of shape "
                                f"{tuple(self.scale.shape)}")
        if (self.zero_point is None) != self.spec.symmetric:
            raise EncodingError(f"a {self.spec} encoding {'has no' if self.spec.symmetric else 'needs a'} zero point")
        zero = self.zero_point
        if zero is not None and (zero.dtype != torch.int32 or zero.shape != self.scale.shape):
            raise EncodingError(f"zero_point must be int32 of shape {tuple(self.scale.shape)}, got {zero.dtype} of "
                                f"{tuple(zero.shape)}")
        if not bool(self._is_valid()):  # one look, for an accelerator is waited for
            if not bool(_are_positive(self.scale).all()):
                raise EncodingError("every scale must be finite and positive")
            raise EncodingError(f"every zero point must lie in {self.spec.qmin}…{self.spec.qmax}")

    @property
    def minimum(self) -> Tensor:
        """Returns the value that ``qmin`` dequantizes to. Shape: as ``scale``."""
        return (self.spec.qmin - self._float_zero_point()) * self.scale

    @property
    def maximum(self) -> Tensor:
        """Returns the value that ``qmax`` dequantizes to. Shape: as ``scale``."""
        return (self.spec.qmax - self._float_zero_point()) * self.scale

    def _float_zero_point(self) -> Tensor:
        return torch.zeros_like(self.scale) if self.zero_point is None else self.zero_point.to(torch.float32)

    def _is_valid(self) -> Tensor:
        valid = _are_positive(self.scale)
        if self.zero_point is not None:
            valid = valid & (self.zero_point >= self.spec.qmin) & (self.zero_point <= self.spec.qmax)
        return valid.all()

    def split(self, parts: Sequence[tuple[QuantSpec, Sequence[int]]]) -> list[Encoding]:
        """Returns the encodings whose scales this one holds one after the other.

        Args:
            parts: of each, its spec, with the codes of this one's, and the shape of its scales.

        Shape: ``scale`` [all scales].
        """
        sizes = [math.prod(shape) for _, shape in parts]
        zero_points = [None] * len(parts) if self.zero_point is None else torch.split(self.zero_point, sizes)
        return [
            _unchecked(spec, scale.reshape(shape), None if zero_point is None else zero_point.reshape(shape))
            for (spec, shape), scale, zero_point in zip(parts, torch.split(self.scale, sizes), zero_points, strict=True)
        ]

    def to(self, device: torch.device) -> Encoding:
        """Returns a copy with the tensors on ``device``."""
        return encodings_to([self], device)[0]

    def equals(self, other: Encoding) -> bool:
        """Says whether spec, scale and zero point are equal, bit for bit."""
        if self.spec != other.spec or not torch.equal(self.scale, other.scale):
            return False
        if self.zero_point is None or other.zero_point is None:
            return self.zero_point is other.zero_point
        return torch.equal(self.zero_point, other.zero_point)


def encodings_to(encodings: Sequence[Encoding], device: torch.device) -> list[Encoding]:
    """The encodings with their tensors on ``device``, in one copy; their numbers, valid before, are not looked at.

    >>> from qtk.core.dtypes import dtype
    >>> encoding = Encoding(QuantSpec(dtype("int8"), symmetric=True), torch.tensor([0.5]))
    >>> encodings_to([encoding], torch.device("meta"))[0].scale.device
    device(type='meta')
    """
    given = [encoding.zero_point for encoding in encodings if encoding.zero_point is not None]
    tensors = moved([*(encoding.scale for encoding in encodings), *given], device)
    zero_points = iter(tensors[len(encodings) :])
    return [
        _unchecked(encoding.spec, scale, None if encoding.zero_point is None else next(zero_points))
        for encoding, scale in zip(encodings, tensors, strict=False)
    ]


def _unchecked(spec: QuantSpec, scale: Tensor, zero_point: Tensor | None) -> Encoding:
    encoding = object.__new__(Encoding)
    for name, value in (("spec", spec), ("scale", scale), ("zero_point", zero_point)):
        object.__setattr__(encoding, name, value)
    return encoding


def _are_positive(scale: Tensor) -> Tensor:
    """Says of each scale whether it is positive and finite."""
    return (scale > 0) & (scale < torch.inf)


HOST = torch.device("cpu")


def moved(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Moves tensors to ``device``, in one copy for each other device; tensors on ``device`` stay as they are.

    Floats of at most 64 bits, booleans, and integers of less than 2⁵³ keep their values: they travel as float64.

    Shape: any; results the same, each in its dtype and contiguous if it was copied.

    >>> [tensor.tolist() for tensor in moved([torch.tensor([0.5]), torch.tensor([[3]])], HOST)]
    [[0.5], [[3]]]
    """
    results = list(tensors)
    for source in {tensor.device for tensor in tensors} - {device}:
        indices = [index for index, tensor in enumerate(tensors) if tensor.device == source]
        packed = torch.cat([tensors[index].detach().reshape(-1).to(torch.float64) for index in indices]).to(device)
        parts = torch.split(packed, [tensors[index].numel() for index in indices])
        for index, part in zip(indices, parts, strict=True):
            results[index] = part.to(tensors[index].dtype, copy=True).reshape(tensors[index].shape)
    return results
