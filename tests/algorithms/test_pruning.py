"""Against least squares over every mask, in float64."""

from itertools import combinations

import torch

from qtk.algorithms.pruning import prune_two_of_four


def rows_and_weights(columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(columns, columns, generator=generator, dtype=torch.float64)
    x = torch.randn(200, columns, generator=generator, dtype=torch.float64) @ mixed
    return x, torch.randn(6, columns, generator=generator, dtype=torch.float64)


def least_squares(x: torch.Tensor, target: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """The weights of one output that are kept, as close to its target as they can be."""
    weight = torch.zeros(x.shape[1], dtype=x.dtype)
    weight[kept] = torch.linalg.lstsq(x[:, kept], target[:, None]).solution[:, 0]
    return weight


def test_four_columns_lose_the_pair_that_costs_least_and_the_others_make_up_for_it():
    x, weight = rows_and_weights(4)
    shift = torch.randn(200, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    target = x @ weight.T + shift
    is_pruned, kept = prune_two_of_four(
        weight[None], (x.T @ x)[None], torch.arange(4)[None], (shift.T @ x)[None], damping=1e-12)
    for output in range(6):
        tried = [least_squares(x, target[:, output], torch.tensor(pair)) for pair in combinations(range(4), 2)]
        best = min(tried, key=lambda each: float((target[:, output] - x @ each).square().sum()))
        torch.testing.assert_close(kept[0, output], best, rtol=1e-6, atol=1e-6)
        assert torch.equal(is_pruned[0, output], best == 0)


def test_fours_of_columns_that_are_apart_lose_two_each_and_little_of_the_output():
    x, weight = rows_and_weights(24)
    fours = torch.arange(24).reshape(2, 4, 3).transpose(1, 2).reshape(-1, 4)  # channels, at three positions of a kernel
    is_pruned, kept = prune_two_of_four(weight[None], (x.T @ x)[None], fours)
    assert bool((is_pruned[0][:, fours].sum(-1) == 2).all())
    assert torch.equal(kept == 0, is_pruned)
    smallest = torch.zeros_like(is_pruned[0])
    for four in fours:
        smallest[:, four] = weight[:, four].abs() < weight[:, four].abs().sort(1).values[:, 2:3]
    target = x @ weight.T
    by_size = torch.stack([least_squares(x, target[:, output], ~smallest[output]) for output in range(6)])
    lost = [float((target - x @ each.T).square().sum()) for each in (kept[0], by_size)]
    assert lost[0] < 0.9 * lost[1]  # by_size has the best weights for its mask
