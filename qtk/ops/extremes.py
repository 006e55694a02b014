"""``qtk::add_extremes_``: what one tensor adds to the smallest and largest elements seen, in one pass over it.

On a GPU it is one launch and nothing is waited for, so that calibration costs little more than reading the tensors.
``qtk::add_extremes_many_`` does so for many tensors, in one launch where they are alike; its block sizes are one list,
of one entry for each axis of each tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qtk.kernels.backends import shares_launches, triton_unavailable
from qtk.numerics import extremes as reference
from qtk.numerics.blocks import flat_sizes, split_sizes

torch.library.define(
    "qtk::add_extremes_",
    "(Tensor input, int[] block_size, float bound, int least, Tensor(a!) low, Tensor(b!) high, Tensor(c!) counts) "
    "-> ()",
)
torch.library.define(
    "qtk::add_extremes_many_",
    "(Tensor[] inputs, int[] block_sizes, float[] bounds, int[] leasts, Tensor(a!)[] lows, Tensor(b!)[] highs, "
    "Tensor(c!)[] counts) -> ()",
)
_OP = torch.ops.qtk.add_extremes_.default
_MANY = torch.ops.qtk.add_extremes_many_.default


def _on_gpu(input: Tensor, *arguments: object) -> None:
    if triton_unavailable() is not None:
        reference.add_extremes_(input, *arguments)  # type: ignore[arg-type]
        return
    from qtk.kernels.gpu import extremes as kernels

    kernels.add_extremes_(input, *arguments)  # type: ignore[arg-type]


def _loop(inputs: Sequence[Tensor], block_sizes: Sequence[int], *rest: Any) -> None:
    for x, *arguments in zip(inputs, split_sizes(inputs, block_sizes), *rest, strict=True):
        _OP(x, *arguments)


def _many_on_gpu(inputs: Sequence[Tensor], block_sizes: Sequence[int], *rest: Any) -> None:
    if not shares_launches(inputs[0].device):
        _loop(inputs, block_sizes, *rest)
        return
    from qtk.kernels.gpu import extremes as kernels

    kernels.add_extremes_many_(inputs, list(split_sizes(inputs, block_sizes)), *rest)


def _fake(*arguments: object) -> None:
    pass


torch.library.impl("qtk::add_extremes_", "CompositeExplicitAutograd", reference.add_extremes_)
torch.library.impl("qtk::add_extremes_many_", "CompositeExplicitAutograd", _loop)
torch.library.impl("qtk::add_extremes_", "CUDA", _on_gpu)
torch.library.impl("qtk::add_extremes_many_", "CUDA", _many_on_gpu)
torch.library.register_fake("qtk::add_extremes_", _fake)
torch.library.register_fake("qtk::add_extremes_many_", _fake)


def add_extremes_(
    x: Tensor, block_size: Sequence[int], bound: float, least: int, low: Tensor, high: Tensor, counts: Tensor
) -> None:
    """Lowers ``low`` and raises ``high`` to the extremes of ``x``, in place; elements ≤ ``bound`` are left out.

    ``counts``: elements that counted, those left out, and calls in which ``x`` held NaN or +inf, or in which fewer
    elements than ``least`` were left out, but some. A NaN in ``x`` makes both ends of its scale NaN for good.

    Shape: ``x`` any, not empty; ``low``, ``high`` float32 [scales], at first inf and -inf; ``counts`` int64 [3].

    >>> low, high, counts = torch.tensor([torch.inf]), torch.tensor([-torch.inf]), torch.zeros(3, dtype=torch.int64)
    >>> add_extremes_(torch.tensor([0.5, -2.0, -torch.inf]), (), -1e30, 0, low, high, counts)
    >>> low, high, counts
    (tensor([-2.]), tensor([0.5000]), tensor([2, 1, 0]))
    """
    _OP(x.detach(), block_size, bound, least, low, high, counts)


def add_extremes_many_(
    xs: Sequence[Tensor], block_sizes: Sequence[Sequence[int]], bounds: Sequence[float], leasts: Sequence[int],
    lows: Sequence[Tensor], highs: Sequence[Tensor], counts: Sequence[Tensor],
) -> None:
    """``add_extremes_`` of each tensor; all arguments have one entry for each.

    >>> lows, highs = [torch.full((1,), torch.inf) for _ in range(2)], [torch.full((1,), -torch.inf) for _ in range(2)]
    >>> counts = [torch.zeros(3, dtype=torch.int64) for _ in range(2)]
    >>> xs = [torch.tensor([0.5, -2.0]), torch.tensor([[3.0]])]
    >>> add_extremes_many_(xs, [(), ()], [-1e30, -1e30], [0, 0], lows, highs, counts)
    >>> lows, highs
    ([tensor([-2.]), tensor([3.])], [tensor([0.5000]), tensor([3.])])
    """
    given = [x.detach() for x in xs]
    _MANY(given, flat_sizes(given, block_sizes), list(bounds), list(leasts), list(lows), list(highs), list(counts))
