"""Multiplication by one number per channel."""

from __future__ import annotations

from torch import Tensor, nn


class ChannelScale(nn.Module):
    """Stateless: multiplies every channel of its input by the scale it is given, which stays an edge of the graph.

    Args:
        axis: the channels of the input.

    >>> import torch
    >>> ChannelScale(1)(torch.ones(1, 2, 2), torch.tensor([1.0, 3.0]))
    tensor([[[1., 1.],
             [3., 3.]]])
    """

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        """Shape: x [..., C, ...] with C at ``axis``; scale [C]; result as x."""
        return x * scale.reshape([-1 if axis == self.axis % x.ndim else 1 for axis in range(x.ndim)])

    def extra_repr(self) -> str:
        return f"axis={self.axis}"
