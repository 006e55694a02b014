"""The call of a module that acts in train mode only: dropout, stochastic depth, a user's own noise."""

from __future__ import annotations

from torch import Tensor, nn


def train_only(x: Tensor, module: nn.Module, writes: bool) -> Tensor:
    """``module(x)``, where ``module`` hands on its input in eval mode.

    >>> import torch
    >>> train_only(torch.ones(2), nn.Dropout(0.5).eval(), False)
    tensor([1., 1.])

    Args:
        x: its input.
        module: the module.
        writes: whether it writes into its input in train mode; it then gets a copy, which other readers of ``x`` do
            not see.

    Shape: any; result as ``x``.
    """
    result: Tensor = module(x.clone() if writes and module.training else x)
    return result
