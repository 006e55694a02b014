"""Top-1: how often the highest score is the right one."""

from __future__ import annotations

from torch import Tensor


class Top1:
    """Counts over batches the rows of scores whose highest is their label.

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
        """Of all rows so far, 0…1; ``None`` without any."""
        return self.hits / self.total if self.total else None
