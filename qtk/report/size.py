"""How many bytes a model takes, in float and quantized."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from qtk.core.encoding import Encoding

BITS_PER_BYTE = 8


def float_size_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of all tensors; one that goes by several names counts once.

    >>> import torch
    >>> float_size_bytes({"weight": torch.zeros(3, 5)})
    60
    """
    return sum(tensor.numel() * tensor.element_size() for tensor in _distinct(tensors).values())


def quantized_size_bytes(tensors: Mapping[str, Tensor], encodings: Mapping[str, Encoding]) -> int:
    """Bytes of codes, packed at their width, and of every scale and zero point; tensors without encoding in float.

    Args:
        tensors: parameters and buffers by name.
        encodings: by site; the site of a parameter has its name.
    """
    total = sum(_qparams_bytes(encoding) for encoding in encodings.values())
    for name, tensor in _distinct(tensors, encodings).items():
        if name in encodings:
            total += _packed_bytes(tensor.numel(), encodings[name])
        else:
            total += tensor.numel() * tensor.element_size()
    return total


def _distinct(tensors: Mapping[str, Tensor], preferred: Mapping[str, Encoding] | None = None) -> dict[str, Tensor]:
    """One name for each tensor: the first, or the first in ``preferred``."""
    names: dict[int, str] = {}
    for name, tensor in tensors.items():
        if id(tensor) not in names or (preferred and name in preferred and names[id(tensor)] not in preferred):
            names[id(tensor)] = name
    return {name: tensors[name] for name in names.values()}


def _qparams_bytes(encoding: Encoding) -> int:
    size = encoding.scale.numel() * encoding.scale.element_size()
    return size if encoding.zero_point is None else size + _packed_bytes(encoding.zero_point.numel(), encoding)


def _packed_bytes(count: int, encoding: Encoding) -> int:
    return -(-count * encoding.spec.dtype.bits // BITS_PER_BYTE)
