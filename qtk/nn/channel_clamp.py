"""A clamp with bounds of its own for every channel."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ChannelClamp(nn.Module):
    """``min(max(x, lower), upper)`` with one bound per channel: a ReLU6 whose channels were scaled.

    The bounds are arguments, so that they stay edges of the graph.

    Args:
        axis: the channel axis.

    >>> ChannelClamp()(torch.tensor([[-1.0, 5.0], [7.0, 9.0]]), torch.zeros(2), torch.tensor([6.0, 8.0]))
    tensor([[0., 5.],
            [6., 8.]])
    """

    def __init__(self, axis: int = 1) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, x: Tensor, lower: Tensor | None, upper: Tensor | None = None) -> Tensor:
        """Shape: ``x`` any; the bounds [C], C being the length of the channel axis; result as ``x``."""
        shape = [1] * x.ndim
        shape[self.axis] = -1
        if lower is not None:
            x = torch.maximum(x, lower.reshape(shape))
        return x if upper is None else torch.minimum(x, upper.reshape(shape))

    def extra_repr(self) -> str:
        return f"axis={self.axis}"
