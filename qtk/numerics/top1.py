"""Top-1 accuracy."""

from __future__ import annotations

from torch import Tensor


class Top1:
    """Accumulates top-1 accuracy over batches.

    >>> import torch
    >>> counted = Top1()
    >>> counted.add(torch.eye(4), torch.tensor([0, 1, 2, 0]))
    >>> counted.share
    0.75
    """

    def __init__(self) -> None:
        self.hits = 0
        self.total = 0

    def add(self, scores: Tensor, labels: Tensor) -> None:
        """Shape: scores [..., classes], labels [...], integer."""
        self.hits += int((scores.argmax(-1) == labels.to(scores.device)).sum())
        self.total += labels.numel()

    @property
    def share(self) -> float | None:
        """Top-1 accuracy of all samples so far, 0…1; ``None`` without samples."""
        return self.hits / self.total if self.total else None
