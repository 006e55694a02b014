"""Modules of one op each, which give the op's output a site name."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Module):
    """Stateless ``F.linear``: weight and bias are arguments, so that they stay edges of the outer graph."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Shape: x [..., in], weight [out, in], bias [out]; result [..., out]."""
        return F.linear(x, weight, bias)


class Add(nn.Module):
    """a + b."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Shape: any that broadcast."""
        return a + b


class Multiply(nn.Module):
    """a · b."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Shape: any that broadcast."""
        return a * b


class SumOfProducts(nn.Module):
    """a · b + c · d, fused."""

    def forward(self, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        """Shape: all four the same."""
        return torch.addcmul(a * b, c, d)


class Blend(nn.Module):
    """share · old + (1 - share) · new."""

    def forward(self, new: Tensor, old: Tensor, share: Tensor) -> Tensor:
        """Shape: all three the same."""
        return torch.lerp(new, old, share)
