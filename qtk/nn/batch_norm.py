"""Batch norm that takes its parameters as arguments, so that they stay edges of the graph."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class BatchNorm(nn.Module):
    """Stateless ``nn.BatchNorm*d``: takes weights and running statistics as arguments, updates the latter in place.

    Args:
        momentum: weight of the newest batch in the running statistics; ``None``: their cumulative average.
        eps: added to the variance.
        always_batch_statistics: normalise by the batch in eval mode too (``track_running_stats=False``).
    """

    def __init__(self, momentum: float | None, eps: float, *, always_batch_statistics: bool = False) -> None:
        super().__init__()
        self.momentum = momentum
        self.eps = eps
        self.always_batch_statistics = always_batch_statistics

    def forward(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        num_batches_tracked: Tensor | None = None,
    ) -> Tensor:
        """Shape: ``x`` [N, C, …]; the others [C], ``num_batches_tracked`` []; result as ``x``."""
        momentum = 0.0 if self.momentum is None else self.momentum
        if self.training and num_batches_tracked is not None:
            num_batches_tracked.add_(1)
            if self.momentum is None:
                momentum = 1.0 / float(num_batches_tracked)
        by_batch = self.training or self.always_batch_statistics
        return F.batch_norm(x, running_mean, running_var, weight, bias, by_batch, momentum, self.eps)

    def extra_repr(self) -> str:
        return f"momentum={self.momentum}, eps={self.eps}"
