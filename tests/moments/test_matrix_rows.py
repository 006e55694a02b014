import torch

from qtk.moments.holdout import Holdout
from qtk.moments.matrix_rows import MatrixRows


def test_the_last_rows_of_each_matrix_are_held_out():
    owner = torch.tensor([1, 0] * 10 + [3])
    x = torch.arange(21.0)[:, None]
    kept, held_out = MatrixRows.of(x, owner, 4).split(Holdout(0.2), batch=0)
    assert (kept.counts, held_out.counts) == ((8, 8, 0, 1), (2, 2, 0, 0))
    assert held_out.rows.flatten().tolist() == [17, 19, 16, 18]
    assert kept.rows.flatten().tolist()[-1] == 20


def test_calls_are_joined_matrix_by_matrix():
    first, second = (MatrixRows.of(x, owner, 2) for x, owner in (
        (torch.tensor([[1.0], [2.0]]), torch.tensor([1, 0])), (torch.tensor([[3.0]]), torch.tensor([0]))))
    joined = MatrixRows.joined([first, second])
    assert [rows.flatten().tolist() for rows in joined] == [[2.0, 3.0], [1.0]]


def test_rows_are_pairs_where_the_same_matrices_are_met():
    x = torch.zeros(3, 1)
    one, same, other = (MatrixRows.of(x, torch.tensor(owner), 2) for owner in ([0, 1, 1], [0, 1, 1], [1, 0, 1]))
    assert one.meets_as(same)
    assert not one.meets_as(other)  # as many rows of each
