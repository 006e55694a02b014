"""Operators that torch's exporter neither translates nor decomposes, as operators that it translates.

Each is exact but for the order of sums and products; where two values are equal, an index may be of either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Decomposition = Callable[..., object]

PRODUCT_FROM = 25
"""Rows above which torch computes Euclidean distances by a matrix product."""


def cdist(x: Tensor, y: Tensor, p: float, compute_mode: int | None = None) -> Tensor:
    """As ``aten._cdist_forward``: distances between the rows of ``x`` [..., P, M] and ``y`` [..., R, M], [..., P, R].

    >>> x, y = torch.tensor([[0.0, 0.0]]), torch.tensor([[3.0, 4.0]])
    >>> cdist(x, y, 2.0), cdist(x, y, 1.0)
    (tensor([[5.]]), tensor([[7.]]))
    """
    is_long = any(not isinstance(each.shape[-2], int) or each.shape[-2] > PRODUCT_FROM for each in (x, y))
    if p == 2 and (compute_mode == 1 or (not compute_mode and is_long)):
        squares = x.square().sum(-1, keepdim=True) + y.square().sum(-1, keepdim=True).mT
        return (squares - 2 * (x @ y.mT)).clamp_min(0).sqrt()
    return _norm(x.unsqueeze(-2) - y.unsqueeze(-3), p)


def pdist(x: Tensor, p: float = 2) -> Tensor:
    """As ``aten._pdist_forward``: distances between the rows of ``x`` [N, M], each pair once, [N · (N − 1) / 2].

    >>> pdist(torch.tensor([[0.0], [1.0], [5.0]]))
    tensor([1., 5., 4.])
    """
    first, second = torch.triu_indices(x.shape[0], x.shape[0], 1, device=x.device).unbind()
    return _norm(x.index_select(0, first) - x.index_select(0, second), p)


def _norm(difference: Tensor, p: float) -> Tensor:
    """The p-norm over the last axis."""
    sizes = difference.abs()
    if p == 0:
        return (sizes != 0).to(sizes.dtype).sum(-1)
    if p == 1:
        return sizes.sum(-1)
    if p == 2:
        return difference.square().sum(-1).sqrt()
    return sizes.amax(-1) if math.isinf(p) else sizes.pow(p).sum(-1).pow(1 / p)


def cumprod(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """As ``aten.cumprod``, in log2(length) products of the value with itself, moved.

    >>> cumprod(torch.tensor([[2.0, 3.0, 4.0, 0.0, 5.0]]), 1)
    tensor([[ 2.,  6., 24.,  0.,  0.]])
    """
    running = x if dtype is None else x.to(dtype)
    for distance in _distances(x, dim):
        running = running * _moved(running, dim, distance, 1)
    return running


def cummax(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """As ``aten.cummax``: the running maximum, and the last index at which it stands.

    >>> cummax(torch.tensor([1.0, 3.0, 2.0, 3.0, 0.0]), 0)
    (tensor([1., 3., 3., 3., 3.]), tensor([0, 1, 1, 3, 3]))
    """
    return _running(x, dim, torch.ge, -math.inf if x.is_floating_point() else torch.iinfo(x.dtype).min)


def cummin(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """As ``aten.cummin``.

    >>> cummin(torch.tensor([3.0, 1.0, 2.0, 1.0]), 0)
    (tensor([3., 1., 1., 1.]), tensor([0, 1, 1, 3]))
    """
    return _running(x, dim, torch.le, math.inf if x.is_floating_point() else torch.iinfo(x.dtype).max)


def _running(
    x: Tensor, dim: int, is_next: Callable[[Tensor, Tensor], Tensor], outside: float
) -> tuple[Tensor, Tensor]:
    if x.ndim == 0:
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
    shape = [1] * x.ndim
    shape[dim] = -1
    values, indices = x, torch.arange(x.shape[dim], device=x.device).reshape(shape).expand(x.shape)
    for distance in _distances(x, dim):
        before, its_index = _moved(values, dim, distance, outside), _moved(indices, dim, distance, 0)
        keeps = is_next(values, before)
        values, indices = torch.where(keeps, values, before), torch.where(keeps, indices, its_index)
    return values, indices


def _distances(x: Tensor, dim: int) -> list[int]:
    """1, 2, 4, … below the length of an axis."""
    length = x.shape[dim] if x.ndim else 1
    return [2**power for power in range(math.ceil(math.log2(length)))] if length > 1 else []


def _moved(x: Tensor, dim: int, distance: int, value: float) -> Tensor:
    """``x`` moved towards the end of an axis, ``value`` in front."""
    front = torch.full_like(x.narrow(dim, 0, distance), value)
    return torch.cat([front, x.narrow(dim, 0, x.shape[dim] - distance)], dim)


def kthvalue(x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """As ``aten.kthvalue``: the k-th smallest value, and an index at which it stands.

    >>> kthvalue(torch.tensor([4.0, 1.0, 3.0]), 2)
    (tensor(3.), tensor(2))
    """
    if x.ndim == 0:
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
    values, indices = (each.narrow(dim, k - 1, 1) for each in torch.topk(x, k, dim, largest=False))
    return (values, indices) if keepdim else (values.squeeze(dim), indices.squeeze(dim))


def median(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """As ``aten.median.dim``: of an even number of values the lower of the two in the middle.

    >>> median(torch.tensor([4.0, 1.0, 3.0, 2.0]), 0)
    (tensor(2.), tensor(3))
    """
    return kthvalue(x, ((x.shape[dim] if x.ndim else 1) + 1) // 2, dim, keepdim)


def median_of_all(x: Tensor) -> Tensor:
    """As ``aten.median``."""
    return median(x.flatten(), 0)[0]


def searchsorted(
    ordered: Tensor, values: Tensor, *, out_int32: bool = False, right: bool = False, side: str | None = None,
    sorter: Tensor | None = None,
) -> Tensor:
    """As ``aten.searchsorted.Tensor``: how many of the ordered values are below each of ``values``.

    >>> searchsorted(torch.tensor([1.0, 2.0, 2.0]), torch.tensor([0.0, 2.0, 9.0]))
    tensor([0, 1, 3])
    """
    if sorter is not None:
        ordered = ordered.gather(-1, sorter)
    ordered = ordered.unsqueeze(-2) if ordered.ndim > 1 else ordered
    counted = ordered <= values.unsqueeze(-1) if right or side == "right" else ordered < values.unsqueeze(-1)
    return counted.to(torch.int64).sum(-1).to(torch.int32 if out_int32 else torch.int64)


def sort_stable(
    x: Tensor, *, stable: bool | None, dim: int = -1, descending: bool = False
) -> tuple[Tensor, Tensor]:
    """As ``aten.sort.stable``: TopK, which ONNX sorts by, takes the lower of the indices of equal values first."""
    return torch.ops.aten.sort.default(x, dim, descending)  # type: ignore[no-any-return]


def hypot(x: Tensor, y: Tensor) -> Tensor:
    """As ``aten.hypot``, of values whose squares are finite."""
    return (x * x + y * y).sqrt()


def fmax(x: Tensor, y: Tensor) -> Tensor:
    """As ``aten.fmax``: the maximum, the other value where one is NaN."""
    return torch.where(x.isnan(), y, torch.where(y.isnan(), x, torch.maximum(x, y)))


def fmin(x: Tensor, y: Tensor) -> Tensor:
    """As ``aten.fmin``."""
    return torch.where(x.isnan(), y, torch.where(y.isnan(), x, torch.minimum(x, y)))


def copysign(x: Tensor, y: Tensor) -> Tensor:
    """As ``aten.copysign.Tensor``.

    >>> copysign(torch.tensor([1.0, -2.0]), torch.tensor([-0.0, 3.0]))
    tensor([-1.,  2.])
    """
    return torch.where(signbit(y), -x.abs(), x.abs())


def signbit(x: Tensor) -> Tensor:
    """As ``aten.signbit``, of −0 too: the inverse of −0 is −∞."""
    return torch.where(x == 0, x.reciprocal(), x) < 0


def rrelu(
    x: Tensor, noise: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """As ``aten.rrelu_with_noise_functional`` in eval mode: the factor below zero is the mean of its bounds."""
    return torch.nn.functional.leaky_relu(x, (lower + upper) / 2), noise


_ATEN = torch.ops.aten

FURTHER: Mapping[Callable[..., object], Decomposition] = {
    torch.ops.aten._cdist_forward.default: cdist,
    torch.ops.aten._pdist_forward.default: pdist,
    _ATEN.cumprod.default: cumprod,
    _ATEN.cummax.default: cummax,
    _ATEN.cummin.default: cummin,
    _ATEN.kthvalue.default: kthvalue,
    _ATEN.median.dim: median,
    _ATEN.median.default: median_of_all,
    _ATEN.searchsorted.Tensor: searchsorted,
    _ATEN.sort.stable: sort_stable,
    _ATEN.hypot.default: hypot,
    _ATEN.fmax.default: fmax,
    _ATEN.fmin.default: fmin,
    _ATEN.copysign.Tensor: copysign,
    _ATEN.signbit.default: signbit,
    _ATEN.rrelu_with_noise_functional.default: rrelu,
}
"""Operator → what it is decomposed into."""
