"""The call of a module that acts in train mode only: dropout, stochastic depth, a user's own noise."""

from __future__ import annotations

from torch import Tensor, nn

from qtk.torch_private import hooks

DROPOUTS = frozenset((
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout,
))
"""torch's own, which are known to return their input in eval mode."""


def train_only(x: Tensor, module: nn.Module, writes: bool) -> Tensor:
    """``module(x)``, where ``module`` returns its input in eval mode.

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
    is_torchs = type(module) in DROPOUTS and not hooks(module)
    if is_torchs and not module.training:  # a call would take as long as a small op
        return x
    result: Tensor = module(x.clone() if writes and module.training else x)
    return result
