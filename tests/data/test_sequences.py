import pytest
import torch
from torch import nn

import qtk
from qtk.errors import CalibrationError


class Sum(nn.Module):
    def forward(self, x, total):
        return x + total, total + x


def batches(count):
    return [(torch.ones(2, 1), torch.zeros(2, 1)) for _ in range(count)]


@pytest.fixture(scope="module")
def sim():
    made = qtk.QuantSim(Sum(), batches(1)[0], states={"total": 1})
    made.compute_encodings(qtk.Sequences(batches(6), reset=3), progress=False)
    return made


def test_every_function_begins_anew_where_a_sequence_does(sim, tmp_path):
    """The range holds the sums of three steps; those of six are clipped."""
    apart, joined = qtk.Sequences(batches(6), reset=3), batches(6)
    clipped = [max(each.clipped for each in sim.compare(data, progress=False)) for data in (apart, joined)]
    assert clipped == [0, pytest.approx(0.5)]
    assert min(sim.drift(apart, progress=False).sqnr_db) > 35 > min(sim.drift(joined, progress=False).sqnr_db)
    losses = [sim.sensitivity(data, progress=False).loss for data in (apart, joined)]
    assert losses[0] < 1e-3 < losses[1]


def test_a_drift_longer_than_its_data_goes_through_the_sequences_again(sim):
    first = batches(3)
    drift = sim.drift(qtk.Sequences(first, reset=lambda batch: batch is first[0]), steps=7, progress=False)
    assert drift.sqnr_db[:3] == drift.sqnr_db[3:6]
    drift = sim.drift(qtk.Sequences(first, reset=3), steps=7, progress=False)
    assert drift.sqnr_db[:3] == drift.sqnr_db[3:6]
    with pytest.raises(CalibrationError, match=r"3 batches are no whole sequences of 2, so .* at most 3 steps, or 2"):
        sim.drift(qtk.Sequences(first, reset=2), steps=7, progress=False)


@pytest.mark.parametrize(("data", "reset", "error"), [
    (batches(2), 0, "reset must be at least 1, the number of batches of a sequence; got 0"),
    (iter(batches(2)), 2, "batches that can be read again, a list or a loader; got list_iterator"),
    (3, 2, "got int"),
])
def test_what_makes_no_sequences_is_refused(data, reset, error):
    with pytest.raises(CalibrationError, match=error):
        qtk.Sequences(data, reset=reset)


@pytest.mark.medium
def test_a_search_rolls_states_in_calibration_and_judges_by_whole_sequences():
    data = qtk.Sequences(batches(9), reset=3)
    sim, account = qtk.quantize(Sum(), data, target="default", states={"total": 1}, holdout=0.5, max_drop=1.0,
                                progress=False)
    assert sim.encodings()["total:input"].maximum == pytest.approx(3.0, abs=0.02)
    rolled, total = [], torch.zeros(2, 1)
    for x, _ in batches(3):
        result, total = sim.model(x, total)
        rolled.append(result)
    expected = torch.tensor([1.0, 2.0, 3.0])[:, None, None]
    error = float((torch.stack(rolled) - expected).square().sum() / (2 * expected.square().sum()))
    assert account.best.drop == pytest.approx(error, rel=1e-3)


@pytest.mark.parametrize("reset", [4, lambda batch: False])
def test_a_search_needs_a_sequence_that_judges(reset):
    with pytest.raises(CalibrationError, match="the 4 batches are one sequence, and the last sequence judges"):
        qtk.quantize(Sum(), qtk.Sequences(batches(4), reset=reset), states={"total": 1}, progress=False)
