"""Which samples are held out, and that their statistics stay apart."""

import warnings

import pytest
import torch
from torch import nn

import qtk
from qtk.errors import CalibrationError
from qtk.moments.holdout import Holdout, holdout_of
from qtk.moments.required_statistics import RequiredStatistics
from qtk.moments.second_moments import SecondMoments
from qtk.numerics.im2col import Geometry


@pytest.mark.parametrize(("length", "kept"), [(64, 51), (10, 8), (3, 2), (2, 2), (1, 1)])
def test_the_last_part_of_a_batch_is_held_out(length, kept):
    x = torch.arange(length)[:, None]
    own, held_out = Holdout(0.2).split(x, batch=0)
    assert torch.equal(torch.cat([own, held_out]), x)
    assert len(own) == kept


def test_of_small_batches_some_are_held_out_whole():
    assert [Holdout(0.25).kept(1, batch) for batch in range(8)] == [1, 1, 1, 0, 1, 1, 1, 0]


def test_moments_of_both_parts_are_those_of_their_rows():
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(10, 5, generator=generator) for _ in range(3)]
    moments, kept, held_out = (
        SecondMoments(Geometry.linear(), RequiredStatistics(holdout=holdout)) for holdout in (Holdout(0.2), None, None)
    )
    for batch in batches:
        moments.observe(batch, batch + 1)
        kept.observe(batch[:8], batch[:8] + 1)
        held_out.observe(batch[8:], batch[8:] + 1)
    assert (moments.rows, moments.held_out.rows, moments.rows_of_all) == (24, 6, 30)
    for own, expected in ((moments, kept), (moments.held_out, held_out)):
        assert torch.equal(own.gram, expected.gram)
        assert torch.equal(own.cross, expected.cross)
    twice = SecondMoments(Geometry.linear(), RequiredStatistics(holdout=Holdout(0.2)))
    for _ in range(2):
        twice.merge(moments)
    assert torch.equal(twice.held_out.gram, 2 * held_out.gram)


def test_groups_are_held_out_whole():
    held_out = holdout_of(0.2, ["a", "b", "a", "c"], 4)
    assert held_out.batches == {3}
    assert [held_out.kept(9, batch) for batch in range(4)] == [9, 9, 9, 0]
    assert holdout_of(0.0, None, 4) is None


@pytest.mark.parametrize(("fraction", "groups", "words"), [
    (1.0, None, "at least 0 and below 1, got 1.0"), (-0.1, None, "got -0.1"), (0.2, ["a", "a"], "of at least 2 kinds"),
    (0.2, ["a"], "a label for each of the 2 calls"), (0.0, ["a", "b"], "holdout=0 holds out none"),
])
def test_what_cannot_be_held_out_is_refused(fraction, groups, words):
    with pytest.raises(CalibrationError, match=words):
        holdout_of(fraction, groups, 2)


@pytest.mark.parametrize(("fraction", "length"), [(0.6, 1), (0.8, 2), (0.9, 1), (0.2, 1), (0.35, 1)])
def test_of_small_batches_that_fraction_is_held_out_whole(fraction, length):
    kept = [Holdout(fraction).kept(length, batch) for batch in range(100)]
    assert kept.count(0) == round(100 * fraction)
    assert set(kept) == {0, length}


@pytest.mark.medium
@pytest.mark.parametrize(("batches", "holdout", "warned"), [
    (4, 0.2, True), (5, 0.2, False), (1, 0.2, True), (4, 0, False), (4, 0.25, False),
])
def test_that_nothing_was_held_out_is_said(batches, holdout, warned):
    torch.manual_seed(0)
    data = [torch.randn(1, 64, 4) for _ in range(batches)]
    sim = qtk.QuantSim(nn.Linear(4, 2), data[0], weight_bits=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = qtk.apply_layerwise(sim, data, "gptq", options=qtk.LayerwiseOptions(holdout=holdout), progress=False)
    said = [str(each.message) for each in caught if "held out no samples for 1 layers" in str(each.message)]
    assert len(said) == warned
    assert (report.layers[0].held_out is None) == (warned or not holdout)
