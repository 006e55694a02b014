"""LPBQ in AIMET's schemas: the scale of a block is an integer times the scale of its channel."""

from __future__ import annotations

import torch
from torch import Tensor

from qtk.core.granularity import PerBlock
from qtk.core.spec import QuantSpec
from qtk.errors import ExportError

SCALE_BITS = 4
"""Integers 1 to 2⁴: int4 codes times such an integer fit int8."""

MOST = 1 << SCALE_BITS


def channel_axis(spec: QuantSpec) -> int:
    """The axis with a float scale for every index: the first one with blocks of 1."""
    assert isinstance(spec.granularity, PerBlock)
    return spec.granularity.sizes.index(1) if 1 in spec.granularity.sizes else 0


def split(scale: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Integers and channel scales whose float32 product is ``scale``, bit for bit.

    The largest integer of a channel need not be 16: a search may have left only smaller ones.

    >>> integers, channel_scale = split(torch.tensor([[1.5, 0.75], [0.5, 0.25]]), 0)
    >>> integers.tolist(), channel_scale.tolist()
    ([[16, 8], [16, 8]], [[0.09375], [0.03125]])

    Shape: ``scale`` float32, [..., axis, ...]; the integers the same, int32; channel scales with every other axis of
    length 1.

    Raises: ExportError if a channel has no such scale.
    """
    others = [other for other in range(scale.ndim) if other != axis]
    largest = scale.amax(others, keepdim=True)
    integers, channel_scale = torch.zeros_like(scale), torch.zeros_like(largest)
    for highest in range(MOST, 0, -1):
        for toward in (None, 0.0, torch.inf):  # the quotient, and the float32 numbers beside it
            unit = largest / highest
            if toward is not None:
                unit = torch.nextafter(unit, torch.full_like(unit, toward))
            multiples = (scale / unit).round()
            exact = (multiples * unit == scale) & (multiples >= 1)
            fits = exact.all(dim=others, keepdim=True) if others else exact
            new = fits & (channel_scale == 0)
            channel_scale = torch.where(new, unit, channel_scale)
            integers = torch.where(new, multiples, integers)
    if bool((channel_scale == 0).any()):
        raise ExportError(f"the block scales of a channel are no integers up to {MOST} times a float32 number; "
                          "calibrate this site again, or plan it without scale_format")
    return integers.int(), channel_scale


def joined(integers: Tensor, channel_scale: Tensor) -> Tensor:
    """The scales of the blocks: inverse of ``split``. Shape: as there."""
    return integers.float() * channel_scale
