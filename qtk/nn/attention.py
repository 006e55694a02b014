"""Scaled dot-product attention as torch's fused kernel, or as single ops that can be observed and quantized."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qtk.nn.recompute import recomputed
from qtk.nn.tap import all_idle


class AttentionCore(nn.Module):
    """``F.scaled_dot_product_attention`` as separate ops, equal to it up to float rounding.

    The mask is applied after the module ``scores``, so that a quantizer on its output never sees −∞. A query whose keys
    are all masked gets zeros, as in torch.

    Args:
        is_causal: a query attends to keys up to its own position only.
        scale: factor of the scores; ``None``: 1/√E.
        enable_gqa: grouped-query attention: each head of keys and values serves several heads of queries.
        p: dropout probability of the attention weights in train mode.
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
            visible = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
            scores = scores.masked_fill(~visible, -math.inf)
        if mask is None:
            weights = self.softmax(scores)
        else:
            masked = ~mask if mask.dtype == torch.bool else mask == -math.inf
            all_masked = masked.all(-1, keepdim=True)  # softmax over −∞ alone would have NaN gradients
            if mask.dtype == torch.bool:
                scores = scores.masked_fill(masked & ~all_masked, -math.inf)
            else:
                scores = scores + mask.masked_fill(all_masked, 0.0)
            weights = self.softmax(scores).masked_fill(all_masked, 0.0)
        result: Tensor = self.context(self.dropout(weights), value)
        return result


class Scores(nn.Module):
    """The product of queries and transposed keys."""

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        """Shape: query [..., L, E], key [..., S, E]; result [..., L, S]."""
        return query @ key.transpose(-2, -1)


class Context(nn.Module):
    """The product of attention weights and values."""

    def forward(self, weights: Tensor, value: Tensor) -> Tensor:
        """Shape: weights [..., L, S], value [..., S, Ev]; result [..., L, Ev]."""
        return weights @ value


class Attention(nn.Module):
    """``F.scaled_dot_product_attention`` as a module: the fused kernel, or ``core`` if a quantizer in it is active.

    Like the kernel's, the gradient of the core computes scores and weights again and keeps neither.

    Args: as for ``AttentionCore``.
    """

    def __init__(
        self, *, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, p: float = 0.0
    ) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.scale = scale
        self.enable_gqa = enable_gqa
        self.core: nn.Module = AttentionCore(is_causal=is_causal, scale=scale, enable_gqa=enable_gqa, p=p)

    @property
    def p(self) -> float:
        """Dropout probability of the attention weights in train mode, stored in the dropout of ``core``."""
        return self._dropout.p

    @p.setter
    def p(self, p: float) -> None:
        self._dropout.p = p

    @property
    def _dropout(self) -> nn.Dropout:
        dropout = self.core.get_submodule("dropout")
        assert isinstance(dropout, nn.Dropout)
        return dropout

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """Shape: as ``AttentionCore``."""
        if not all_idle(self):
            return recomputed(self.core, query, key, value, mask)
        return F.scaled_dot_product_attention(
            query, key, value, mask, self.p if self.training else 0.0, self.is_causal, scale=self.scale,
            enable_gqa=self.enable_gqa,
        )

    def parts(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> dict[str, tuple[nn.Module, tuple[Tensor | None, ...]]]:
        """Submodule name → (module, its arguments): what is captured as a graph of its own."""
        return {"core": (self.core, (query, key, value, mask))}

    def extra_repr(self) -> str:
        return f"is_causal={self.is_causal}, scale={self.scale}, enable_gqa={self.enable_gqa}, p={self.p}"
