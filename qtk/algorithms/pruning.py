"""The 2:4 mask of a weight and what its kept weights become: two of four weights pruned by the output's error.

As SparseGPT (Frantar and Alistarh, arXiv 2301.00774, section 3.3) it goes through the weight once, in GPTQ's order, and
propagates what pruning changes to the columns that remain. With the Hessian G of four columns, given all columns before
(the rows and columns of ``L Lᵀ`` in ``qtk.algorithms.gptq``), pruning the pair P of the weights w costs

    w_Pᵀ ([G⁻¹]_PP)⁻¹ w_P        the kept ones become  w - G⁻¹[:, P] ([G⁻¹]_PP)⁻¹ w_P

which is SparseGPT's ``w² / [H⁻¹]_jj`` for both at once; of the six pairs each output takes the cheapest.
"""

from __future__ import annotations

from itertools import combinations

import torch
from torch import Tensor

from qtk.algorithms.hessian_factor import HessianFactor

FOUR = 4
PAIRS = [list(pair) for pair in combinations(range(FOUR), 2)]


def prune_two_of_four(
    weight: Tensor, hessian: Tensor, fours: Tensor, linear: Tensor | None = None, *, damping: float = 0.01
) -> tuple[Tensor, Tensor]:
    """Returns which weights are pruned, and the weights after that, in float.

    Args:
        weight: float weights, in the dtype to compute in.
        hessian: ``X̂ᵀX̂``.
        fours: the columns of every four, each column once.
        linear: the linear term of the error, ``None`` for 0.
        damping: as of ``gptq``.

    Shape: ``weight``, ``linear`` and both results, the first bool, [groups, outputs, columns]; ``hessian`` [groups,
    columns, columns]; ``fours`` int64 [columns / 4, 4].

    Raises: CalibrationError if the damped Hessian is not positive definite.
    """
    power = hessian.diagonal(dim1=-2, dim2=-1).sum(0)[fours].sum(-1)
    order = fours[power.argsort()].flatten()  # the last four, with the largest inputs, are the first to be pruned
    factor = HessianFactor.of(hessian, order.expand(len(hessian), -1), damping, weight.dtype)
    target, result = weight[..., order], torch.empty_like(weight)
    is_pruned = torch.zeros_like(weight, dtype=torch.bool)
    residual = torch.zeros_like(target) if linear is None else factor.solved(linear.to(weight.dtype)[..., order])
    patterns = torch.tensor([[column in pair for column in range(FOUR)] for pair in PAIRS], device=weight.device)
    for begin in range(len(order) - FOUR, -1, -FOUR):
        here = slice(begin, begin + FOUR)
        corner = factor.lower[:, here, here]
        best = target[..., here] + torch.linalg.solve_triangular(corner, residual[..., here], upper=False, left=False,
                                                                 unitriangular=True)
        inverse, costs, moved = torch.cholesky_inverse(corner * factor.power[..., here].sqrt()), [], []
        for pair in PAIRS:
            needed = torch.linalg.solve(inverse[:, pair][..., pair], best[..., pair].mT).mT
            costs.append((needed * best[..., pair]).sum(-1))
            moved.append(best - needed @ inverse[:, pair])
        choice = torch.stack(costs).argmin(0)
        pruned = patterns[choice]
        kept = torch.stack(moved).gather(0, choice[None, ..., None].expand(1, *best.shape))[0].masked_fill(pruned, 0)
        residual[..., :begin] += (target[..., here] - kept) @ factor.lower[:, here, :begin]
        columns = order[here]
        result[..., columns], is_pruned[..., columns] = kept, pruned
    return is_pruned, result
