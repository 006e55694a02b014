"""Dropout that is on in train mode and off in eval mode, whichever kind was captured."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

Kind = Literal["dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"]


class Dropout(nn.Module):
    """One of torch's dropouts.

    Args:
        kind: the torch function: ``dropout`` zeroes elements, ``feature_dropout`` channels; ``alpha_…`` keep mean and
            variance.
        p: probability of an element or channel to be dropped.
        always: on in eval mode too, as in Monte Carlo dropout.

    >>> Dropout("dropout", 0.5).eval()(torch.ones(2))
    tensor([1., 1.])
    """

    def __init__(self, kind: Kind, p: float, *, always: bool = False) -> None:
        super().__init__()
        self.kind: Kind = kind
        self.p = p
        self.always = always

    def forward(self, x: Tensor) -> Tensor:
        """Shape: any; ``feature_…`` drop along axis 1. Result as ``x``."""
        if not (self.training or self.always):
            return x
        match self.kind:
            case "dropout":
                return torch.dropout(x, self.p, True)
            case "feature_dropout":
                return torch.feature_dropout(x, self.p, True)
            case "alpha_dropout":
                return torch.alpha_dropout(x, self.p, True)
            case "feature_alpha_dropout":
                return torch.feature_alpha_dropout(x, self.p, True)

    def extra_repr(self) -> str:
        return f"{self.kind}, p={self.p}{', always on' if self.always else ''}"
