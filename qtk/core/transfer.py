"""Many small tensors copied to another device together: the host waits for an accelerator once, not once a tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

HOST = torch.device("cpu")


def moved(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The tensors on ``device``, those of another device in one copy for each; the rest as they are.

    Floats of at most 64 bits, booleans, and integers of less than 2⁵³ keep their values: they travel as float64.

    Shape: any; results alike, each in its dtype and contiguous if it was copied.

    >>> [tensor.tolist() for tensor in moved([torch.tensor([0.5]), torch.tensor([[3]])], HOST)]
    [[0.5], [[3]]]
    """
    results = list(tensors)
    for source in {tensor.device for tensor in tensors} - {device}:
        indices = [index for index, tensor in enumerate(tensors) if tensor.device == source]
        packed = torch.cat([tensors[index].detach().reshape(-1).to(torch.float64) for index in indices]).to(device)
        parts = torch.split(packed, [tensors[index].numel() for index in indices])
        for index, part in zip(indices, parts, strict=True):
            results[index] = part.to(tensors[index].dtype, copy=True).reshape(tensors[index].shape)
    return results
