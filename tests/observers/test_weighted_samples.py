import torch

from qtk.observers.weighted_samples import WeightedSamples


def samples(scales=3, points=4, counts=True):
    numbers = torch.arange(float(scales))
    return WeightedSamples(
        torch.arange(float(scales * points)).reshape(scales, points),
        torch.ones(scales, points, dtype=torch.int64) if counts else None, numbers, numbers + 1, numbers + 2,
        binned=False,
    )


def test_some_of_the_scales_with_all_that_belongs_to_them():
    masked = torch.tensor([False, True, False])
    for chosen, rows in ((slice(1, 3), [1, 2]), (torch.tensor([2, 0]), [2, 0]), (masked, [1])):
        few = samples().of(chosen)
        assert few.scales == len(rows)
        assert few.values[:, 0].tolist() == [4.0 * row for row in rows]
        assert few.counts.shape == few.values.shape
        found = zip(few.low.tolist(), few.high.tolist(), few.reach.tolist(), strict=True)
        assert list(found) == [(row, row + 1, row + 2) for row in rows]
    assert samples(counts=False).of(slice(0, 1)).counts is None


def test_what_can_be_put_under_one_another_is_of_one_kind():
    assert samples().kind == samples(scales=7).kind
    assert len({samples().kind, samples(points=5).kind, samples(counts=False).kind}) == 3
