"""Scaled dot-product attention as torch's fused kernel, or as single ops that can be observed and quantized."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qtk.nn.tap import all_idle


class AttentionCore(nn.Module):
    """Scores, softmax and context in plain ops; equal to ``F.scaled_dot_product_attention`` but for float rounding.

    Scores are masked after they were made, so that a quantizer on them never sees −∞. A query all of whose keys are
    masked gets zeros, as in torch.

    Args:
        is_causal: a query sees the keys up to its own position.
        scale: of the scores; ``None``: 1/√E.
        enable_gqa: keys and values have fewer heads, each shared by as many queries' heads as it takes.
        p: probability that a weight is dropped in train mode.
    """

    def __init__(self, *, is_causal: bool, scale: float | None, enable_gqa: bool, p: float) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.scale = scale
        self.enable_gqa = enable_gqa
        self.scores = Scores()
        self.softmax = nn.Softmax(-1)
        self.dropout = nn.Dropout(p)
        self.context = Context()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """Shape: query [..., L, E], key [..., S, E], value [..., S, Ev], mask [..., L, S]; result [..., L, Ev]."""
        if self.enable_gqa:
            key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
            value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
        scores = self.scores(query, key) * (1 / math.sqrt(query.shape[-1]) if self.scale is None else self.scale)
        if self.is_causal:
            seen = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
            scores = scores.masked_fill(~seen, -math.inf)
        if mask is None:
            weights = self.softmax(scores)
        else:
            masked = ~mask if mask.dtype == torch.bool else mask == -math.inf
            blind = masked.all(-1, keepdim=True)  # −∞ alone would make NaN of the gradient, even where it is not used
            if mask.dtype == torch.bool:
                scores = scores.masked_fill(masked & ~blind, -math.inf)
            else:
                scores = scores + mask.masked_fill(blind, 0.0)
            weights = self.softmax(scores).masked_fill(blind, 0.0)
        result: Tensor = self.context(self.dropout(weights), value)
        return result


class Scores(nn.Module):
    """Scores: the product of queries and keys."""

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        """Shape: query [..., L, E], key [..., S, E]; result [..., L, S]."""
        return query @ key.transpose(-2, -1)


class Context(nn.Module):
    """Context: the product of attention weights and values."""

    def forward(self, weights: Tensor, value: Tensor) -> Tensor:
        """Shape: weights [..., L, S], value [..., S, Ev]; result [..., L, Ev]."""
        return weights @ value


class Attention(nn.Module):
    """``F.scaled_dot_product_attention`` as a module: torch's fused kernel while every tap inside is idle.

    Args: as for ``AttentionCore``, which ``core`` is.
    """

    def __init__(
        self, *, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, p: float = 0.0
    ) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.scale = scale
        self.enable_gqa = enable_gqa
        self.p = p
        self.core: nn.Module = AttentionCore(is_causal=is_causal, scale=scale, enable_gqa=enable_gqa, p=p)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """Shape: as ``AttentionCore``."""
        if not all_idle(self):
            seen: Tensor = self.core(query, key, value, mask)
            return seen
        return F.scaled_dot_product_attention(
            query, key, value, mask, self.p if self.training else 0.0, self.is_causal, scale=self.scale,
            enable_gqa=self.enable_gqa,
        )

    def parts(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> dict[str, tuple[nn.Module, tuple[Tensor | None, ...]]]:
        """The module to be captured by itself, by its name in this one, and what it is called with here."""
        return {"core": (self.core, (query, key, value, mask))}

    def extra_repr(self) -> str:
        return f"is_causal={self.is_causal}, scale={self.scale}, enable_gqa={self.enable_gqa}, p={self.p}"
