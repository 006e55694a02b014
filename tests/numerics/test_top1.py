import torch

from qtk.numerics.top1 import Top1


def test_batches_count_by_their_rows():
    counted = Top1()
    assert counted.share is None
    counted.add(torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]]), torch.tensor([1, 1, 1]))
    counted.add(torch.tensor([[[5.0, 4.0]]]), torch.tensor([[0]]))
    assert (counted.hits, counted.total, counted.share) == (3, 4, 0.75)


def test_no_rows_are_no_share():
    counted = Top1()
    counted.add(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64))
    assert counted.share is None
