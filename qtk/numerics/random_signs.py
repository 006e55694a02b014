"""Random signs: one product with a Jacobian tells the sums of squares of its columns (Hutchinson's estimator)."""

from __future__ import annotations

import torch
from torch import Tensor


def random_signs(like: Tensor, generator: torch.Generator) -> Tensor:
    """-1 or 1, with the same chance, on the device and in the dtype of ``like``.

    Shape: as ``like``. ``generator``: on the CPU, so that the signs are the same on every device.

    >>> random_signs(torch.zeros(2, 3), torch.Generator().manual_seed(0)).abs()
    tensor([[1., 1., 1.],
            [1., 1., 1.]])
    """
    pinned = like.device.type == "cuda"  # the copy of which is not waited for
    bits = torch.randint(0, 2, like.shape, generator=generator, dtype=torch.int8, pin_memory=pinned)
    return bits.to(like.device, non_blocking=pinned).mul_(2).sub_(1).to(like.dtype)
