"""Copies in another order, while the diagonal changes."""

import torch

from qtk.algorithms.ordered_gram import OrderedGram, in_order

ORDER = torch.tensor([[2, 0, 1], [1, 2, 0]])


def grams():
    x = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))
    return x.mT @ x


def expected(gram, order):
    return torch.stack([each[columns][:, columns] for each, columns in zip(gram, order, strict=True)])


def test_rows_and_columns_follow_the_order():
    assert torch.equal(in_order(grams(), ORDER), expected(grams(), ORDER))


def test_each_copy_has_the_diagonal_of_now_and_may_be_overwritten():
    gram, ordered = grams(), OrderedGram()
    for prior in (0.0, 1.0, 10.0):
        gram.diagonal(dim1=-2, dim2=-1).add_(prior)
        copy = ordered.copy(gram, ORDER)
        assert torch.equal(copy, expected(gram, ORDER))
        copy.zero_()


def test_what_is_forgotten_is_read_anew():
    gram, ordered = grams(), OrderedGram()
    ordered.copy(gram, ORDER)
    ordered.clear()
    assert torch.equal(ordered.copy(2 * gram, ORDER), expected(2 * gram, ORDER))


def test_another_order_is_another_copy():
    gram, ordered = grams(), OrderedGram()
    ordered.copy(gram, ORDER)
    assert torch.equal(ordered.copy(gram, ORDER.flip(0)), expected(gram, ORDER.flip(0)))
