"""Mixtures of experts: one stack of weights for all experts, and tokens routed by counts, offsets and indices."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HIDDEN, EXPERTS, CHOSEN = 16, 32, 4, 2


def _traces_grouped_products() -> bool:
    """Whether torch can trace grouped products of float32; torch 2.11 can those of bfloat16 alone."""
    x, stack = torch.empty(4, 16, device="meta"), torch.empty(2, 16, 16, device="meta")
    try:
        F.grouped_mm(x, stack, offs=torch.empty(2, dtype=torch.int32, device="meta"))
    except RuntimeError:
        return False
    return True


TRACES_GROUPED_PRODUCTS = _traces_grouped_products()


class _Experts(nn.Module):
    """A router and two stacks of weights ``[experts, out, in]``; the first expert's weights are 50 times the last's."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        sizes = torch.logspace(0, -1.7, EXPERTS).reshape(-1, 1, 1)
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) * sizes)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) * sizes)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        share, expert = self.router(x).softmax(-1).topk(CHOSEN, dim=-1)  # [batch, chosen]
        return self.head(x + self.mixed(x, share, expert))  # type: ignore[no-any-return]

    def mixed(self, x: Tensor, share: Tensor, expert: Tensor) -> Tensor:
        raise NotImplementedError


class GroupedExperts(_Experts):
    """Tokens sorted by expert, and one grouped product over all experts; the offsets are counts that were added up."""

    def mixed(self, x: Tensor, share: Tensor, expert: Tensor) -> Tensor:
        order = expert.reshape(-1).argsort()
        by_expert = x[order // CHOSEN]
        counts = torch.histc(expert.reshape(-1).float(), EXPERTS, 0, EXPERTS - 1)
        ends = counts.cumsum(0, dtype=torch.int32)
        hidden = F.silu(F.grouped_mm(by_expert, self.up.mT, offs=ends))
        found = F.grouped_mm(hidden, self.down.mT, offs=ends) * share.reshape(-1)[order, None]
        return found[order.argsort()].reshape(-1, CHOSEN, WIDTH).sum(1)


class GatheredExperts(_Experts):
    """Every token multiplied with a copy of its expert's weights."""

    def mixed(self, x: Tensor, share: Tensor, expert: Tensor) -> Tensor:
        chosen = expert.reshape(-1)
        hidden = F.silu(torch.bmm(self.up[chosen], x.repeat_interleave(CHOSEN, 0).unsqueeze(-1)))
        found = torch.bmm(self.down.index_select(0, chosen), hidden).squeeze(-1) * share.reshape(-1, 1)
        return found.reshape(-1, CHOSEN, WIDTH).sum(1)


class DispatchedExperts(_Experts):
    """All experts on all tokens, as an einsum and a batched product; a one-hot mask says which results count."""

    def mixed(self, x: Tensor, share: Tensor, expert: Tensor) -> Tensor:
        mask = F.one_hot(expert, EXPERTS).to(x.dtype)  # [batch, chosen, experts]
        hidden = F.silu(torch.einsum("bi,eoi->ebo", x, self.up))
        found = torch.baddbmm(torch.zeros(EXPERTS, 1, WIDTH), hidden, self.down.mT)  # [experts, batch, out]
        weights = (mask * share.unsqueeze(-1)).sum(1)  # [batch, experts]
        return torch.einsum("ebo,be->bo", found, weights)
