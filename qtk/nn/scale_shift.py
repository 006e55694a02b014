"""A scale and a shift for every channel: a batch norm whose statistics are fixed."""

from __future__ import annotations

from torch import Tensor, nn


class ScaleShift(nn.Module):
    """``x * scale + shift`` with one scale and one shift per channel, which are arguments, so that they stay edges.

    Args:
        axis: the channel axis.
    """

    def __init__(self, axis: int = 1) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        """Shape: ``x`` any; ``scale`` and ``shift`` [C], C being the length of the channel axis; result as ``x``."""
        shape = [1] * x.ndim
        shape[self.axis] = -1
        return x * scale.reshape(shape) + shift.reshape(shape)

    def extra_repr(self) -> str:
        return f"axis={self.axis}"
