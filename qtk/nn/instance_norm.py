"""Instance norm with running statistics, whose tensors come in as arguments, so that they stay edges of the graph."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class InstanceNorm(nn.Module):
    """``nn.InstanceNorm*d(track_running_stats=True)`` without state of its own.

    Normalises by the input and updates the running statistics in train mode, normalises by them in eval mode.

    Args:
        momentum: weight of the newest batch in the running statistics.
        eps: added to the variance.
    """

    def __init__(self, momentum: float, eps: float) -> None:
        super().__init__()
        self.momentum = momentum
        self.eps = eps

    def forward(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor, running_var: Tensor
    ) -> Tensor:
        """Shape: ``x`` [N, C, …]; the others [C]; result as ``x``."""
        return F.instance_norm(x, running_mean, running_var, weight, bias, self.training, self.momentum, self.eps)

    def extra_repr(self) -> str:
        return f"momentum={self.momentum}, eps={self.eps}"
