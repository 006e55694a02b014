"""Instance norm that takes its parameters and running statistics as arguments, so that they stay graph edges."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class InstanceNorm(nn.Module):
    """Stateless ``nn.InstanceNorm*d(track_running_stats=True)``.

    Train mode normalises by the input's statistics and updates the running ones; eval mode normalises by these.

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
