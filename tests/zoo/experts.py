"""Mixtures of experts: one stack of weights for all experts, and tokens routed by counts, offsets and indices."""

from __future__ import annotations

from collections.abc import Callable

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
        found = torch.baddbmm(x.new_zeros(EXPERTS, 1, WIDTH), hidden, self.down.mT)  # [experts, batch, out]
        weights = (mask * share.unsqueeze(-1)).sum(1)  # [batch, experts]
        return torch.einsum("ebo,be->bo", found, weights)


def _grouped_mm(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    output = input.new_zeros(len(input), weight.shape[2])
    start = 0
    for matrix, end in zip(weight, offs.tolist(), strict=True):
        output[start:end] = input[start:end] @ matrix
        start = end
    return output


def grouped_mm_of_transformers() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The operator that transformers defines for grouped products in float32, which torch cannot trace; defined here
    where that package is not installed."""
    if not hasattr(torch.ops.transformers, "grouped_mm_fallback"):
        torch.library.custom_op("transformers::grouped_mm_fallback", _grouped_mm, mutates_args=(),
                                schema="(Tensor input, Tensor weight, Tensor offs) -> Tensor")
        torch.library.register_fake("transformers::grouped_mm_fallback",
                                    lambda input, weight, offs: input.new_empty(input.shape[0], weight.shape[2]))
    return torch.ops.transformers.grouped_mm_fallback.default  # type: ignore[no-any-return]


class FusedExperts(nn.Module):
    """A block of experts as transformers writes it: rows sorted by expert, gate and up projection in one stack."""

    def __init__(self, width: int = 16, hidden: int = 16, experts: int = 4, chosen: int = 2) -> None:
        super().__init__()
        self.chosen, self.experts = chosen, experts
        self.gate = nn.Linear(width, experts, bias=False)
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * hidden, width) * width ** -0.5)
        self.down_proj = nn.Parameter(torch.randn(experts, width, hidden) * hidden ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        share, expert = self.gate(x).softmax(-1).topk(self.chosen, dim=-1)
        order = expert.reshape(-1).argsort()
        ends = torch.histc(expert.reshape(-1).float(), self.experts, 0, self.experts - 1).cumsum(0).to(torch.int32)
        product = grouped_mm_of_transformers()
        gate, up = product(x[order // self.chosen], self.gate_up_proj.transpose(-2, -1), ends).chunk(2, -1)
        rows = product(F.silu(gate) * up, self.down_proj.transpose(-2, -1), ends) * share.reshape(-1)[order, None]
        return rows[order.argsort()].reshape(-1, self.chosen, x.shape[-1]).sum(1)

    def apart(self) -> ApartExperts:
        """The same function, one ``nn.Linear`` a matrix."""
        return ApartExperts(self)


class ApartExperts(nn.Module):
    """``FusedExperts`` with one ``nn.Linear`` a matrix, each on the rows that chose it."""

    def __init__(self, fused: FusedExperts) -> None:
        super().__init__()
        self.chosen, self.experts, self.gate = fused.chosen, fused.experts, fused.gate
        self.up, self.down = (
            nn.ModuleList(nn.Linear(stack.shape[2], stack.shape[1], bias=False) for _ in stack)
            for stack in (fused.gate_up_proj, fused.down_proj)
        )
        with torch.no_grad():
            for layers, stack in ((self.up, fused.gate_up_proj), (self.down, fused.down_proj)):
                for layer, matrix in zip(layers, stack, strict=True):
                    layer.weight.copy_(matrix)  # type: ignore[operator]

    def forward(self, x: Tensor) -> Tensor:
        share, expert = self.gate(x).softmax(-1).topk(self.chosen, dim=-1)
        result = torch.zeros_like(x)
        for index, (up_proj, down) in enumerate(zip(self.up, self.down, strict=True)):
            rows, places = torch.where(expert == index)
            gate, up = up_proj(x[rows]).chunk(2, -1)
            result = result.index_add(0, rows, down(F.silu(gate) * up) * share[rows, places, None])
        return result
