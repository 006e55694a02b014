import torch

from qtk.observers.row_sample import RowSample


def numbered(first, count):
    return torch.arange(first, first + count, dtype=torch.float32)[None, :, None]


def test_all_rows_while_there_is_room():
    sample = RowSample(10)
    sample.add(numbered(0, 4))
    sample.add(numbered(4, 6))
    assert sample.rows.flatten().tolist() == list(range(10))


def test_evenly_spread_however_they_come():
    for sizes in ([100], [1] * 100, [7, 50, 3, 40]):
        sample, first = RowSample(16), 0
        for size in sizes:
            sample.add(numbered(first, size))
            first += size
        assert sample.seen == 100
        assert sample.rows.flatten().tolist() == list(range(0, 100, 8))


def test_merged_samples_know_both():
    left, right = RowSample(8), RowSample(8)
    left.add(numbered(0, 8))
    right.add(numbered(100, 8))
    left.merge(right)
    assert left.seen == 16
    assert left.rows.flatten().tolist() == [0, 2, 4, 6, 100, 102, 104, 106]


def test_a_copy_is_its_own():
    sample = RowSample(4)
    sample.add(numbered(0, 3))
    copied = sample.moved(torch.device("cpu"))
    copied.add(numbered(3, 1))
    assert (sample.rows.shape[1], copied.rows.shape[1]) == (3, 4)
    assert sample.rows.data_ptr() != copied.rows.data_ptr()
