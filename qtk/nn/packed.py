"""Packs padded sequences, with the check that torch leaves out."""

from __future__ import annotations

import torch
from torch import Tensor


def pack_padded(x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """The elements of padded sequences, time step by time step, and how many sequences have one at each.

    >>> data, batch_sizes = pack_padded(torch.tensor([[1, 2, 3], [4, 0, 0]]), torch.tensor([3, 1]), True)
    >>> data.tolist(), batch_sizes.tolist()
    ([1, 4, 2, 3], [2, 1, 1])

    Shape: x [T, N, …], or [N, T, …] if ``batch_first``; lengths [N], the longest first, on the CPU. Results: [ΣN, …]
    and [max(lengths)].

    Raises: ValueError if a length exceeds T: torch (2.14) then returns too few elements, and its kernels read beyond
        them; RuntimeError as torch for lengths in another order, or below 1.
    """
    steps = x.shape[1 if batch_first else 0]
    if lengths.numel() and int(lengths.max()) > steps:
        raise ValueError(f"a sequence to pack has a length of {int(lengths.max())}, the padded input has {steps} time "
                         "steps; pass lengths of at most that")
    packed: tuple[Tensor, Tensor] = torch.ops.aten._pack_padded_sequence(x, lengths, batch_first)
    return packed
