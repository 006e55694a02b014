"""``qtk::add_extremes_``: what one tensor adds to the smallest and largest elements seen, in one pass over it.

On a GPU it is one launch and nothing is waited for, so that calibration costs little more than reading the tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from qtk.numerics import extremes as reference
from qtk.ops.registration import Kernel, nothing, register

_OP = register(
    "add_extremes_(Tensor input, int[] block_size, float bound, int least, Tensor(a!) low, Tensor(b!) high, "
    "Tensor(c!) counts) -> ()",
    reference.add_extremes_, nothing, gpu=Kernel("extremes", "add_extremes_"),
)


def add_extremes_(
    x: Tensor, block_size: Sequence[int], bound: float, least: int, low: Tensor, high: Tensor, counts: Tensor
) -> None:
    """Lowers ``low`` and raises ``high`` to the extremes of ``x``, in place; elements ≤ ``bound`` are left out.

    ``counts``: elements that counted, those left out, and calls in which ``x`` held NaN or +inf, or in which fewer
    elements than ``least`` were left out, but some. A NaN in ``x`` makes both ends of its scale NaN for good.

    Shape: ``x`` any, not empty; ``low``, ``high`` float32 [scales], at first inf and -inf; ``counts`` int64 [3].

    >>> import torch
    >>> low, high, counts = torch.tensor([torch.inf]), torch.tensor([-torch.inf]), torch.zeros(3, dtype=torch.int64)
    >>> add_extremes_(torch.tensor([0.5, -2.0, -torch.inf]), (), -1e30, 0, low, high, counts)
    >>> low, high, counts
    (tensor([-2.]), tensor([0.5000]), tensor([2, 1, 0]))
    """
    _OP(x.detach(), block_size, bound, least, low, high, counts)

