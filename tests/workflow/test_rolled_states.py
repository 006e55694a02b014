"""States are handed from batch to batch while data run, and nowhere else."""

import pytest
import torch
from torch import nn

import qtk
from qtk.errors import CalibrationError
from qtk.workflow.forward_pass import outputs


class Sum(nn.Module):
    """A state that adds up what it is given, and its double."""

    def forward(self, x, state):
        total = {"sum": state["sum"] + x, "last": x}
        return x + state["last"], total


def batch(value, count=2):
    return torch.full((count, 1), float(value)), {"sum": torch.zeros(count, 1), "last": torch.zeros(count, 1)}


def sums(sim, batches, **options):
    return [float(each[1]["sum"][0, 0]) for each in outputs(sim.model, batches, **options)]


@pytest.fixture(scope="module")
def sim():
    made = qtk.QuantSim(Sum(), batch(1), states={"state_sum": 1, "state_last": 2}, activation_bits=16)
    made.compute_encodings([batch(value) for value in (1, 2, 3, 4)], progress=False)
    return made


def test_each_batch_begins_with_what_the_one_before_returned(sim):
    found = sums(sim, [batch(value) for value in (1, 2, 3, 4)])
    assert found == pytest.approx([1, 3, 6, 10], abs=0.01)
    assert float(sim.encodings()["state_sum:input"].maximum) == pytest.approx(10, abs=0.01)


def test_a_sequence_begins_where_reset_says_so(sim):
    batches = [batch(value) for value in (1, 2, 3, 4)]
    assert sums(sim, batches, reset=2) == pytest.approx([1, 3, 3, 7], abs=0.01)
    assert sums(sim, batches, reset=lambda given: float(given[0][0]) == 4) == pytest.approx([1, 3, 6, 4], abs=0.01)


def test_a_call_by_the_user_keeps_the_states_that_it_brings_along(sim):
    sums(sim, [batch(1), batch(2)])
    assert float(sim.model(*batch(3))[1]["sum"][0, 0]) == pytest.approx(3, abs=0.01)


def test_several_runs_of_a_batch_begin_with_the_same_states(sim):
    def twice(model, given):
        model(*given)
        return model(*given)

    assert sums(sim, [batch(1), batch(2), batch(3)], forward=twice) == pytest.approx([1, 3, 6], abs=0.01)


def test_streams_that_change_without_a_reset_are_an_error_that_names_both_ends(sim):
    with pytest.raises(CalibrationError, match=r"state state_sum is \[3, 1\] in this batch, and output 1 of the batch "
                                               r"before is \[2, 1\]; begin a new sequence"):
        sums(sim, [batch(1), batch(1, count=3)])
    assert sums(sim, [batch(1), batch(1, count=3)], reset=1) == pytest.approx([1, 1], abs=0.01)


def test_a_reset_of_what_has_no_states_or_no_length_is_refused(sim):
    with pytest.raises(CalibrationError, match="the model has no states; name them"):
        list(outputs(nn.Linear(2, 2), [torch.zeros(1, 2)], reset=2))
    with pytest.raises(CalibrationError, match="reset must be at least 1"):
        sums(sim, [batch(1)], reset=0)


def test_every_function_that_measures_rolls(sim):
    batches = [batch(value) for value in (1, 2, 3, 4)]
    error = next(each for each in sim.compare(batches, progress=False) if each.site == "state_sum:input")
    assert error.clipped == 0
    assert error.own_sqnr_db > 60
