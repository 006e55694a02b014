import torch

from qtk.algorithms.odd_rows import LIMIT, odd_rows


def rows(seed, count=12, statistics=60, common=0.0):
    generator = torch.Generator().manual_seed(seed)
    shared = common * torch.randn(count, 1, generator=generator)
    return torch.randn(count, statistics, generator=generator) + shared


def test_ordinary_rows_are_not_odd_though_their_statistics_move_together():
    found = sum(bool((odd_rows(rows(seed, common=common))[0] > LIMIT).any()) for seed in range(40)
                for common in (0.0, 1.0, 5.0))
    assert found <= 3  # of 120


def test_the_odd_row_and_its_farthest_statistic_are_named():
    table = rows(0)
    table[3] += 10
    table[3, 7] = 300
    scores, farthest = odd_rows(table)
    assert (scores > LIMIT).nonzero().flatten().tolist() == [3]
    assert int(farthest[3]) == 7


def test_unknown_statistics_and_constant_ones_count_for_nothing():
    table = rows(1)
    table[2, :30] = float("nan")
    table[:, 40] = 1.0
    assert not bool((odd_rows(table)[0] > LIMIT).any())
