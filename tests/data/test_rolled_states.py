"""States are handed from batch to batch while data run, and nowhere else."""

import pytest
import torch
from torch import nn

import qtk
from qtk.data.forward_pass import outputs, run_all
from qtk.data.recorded_calls import recorded_calls
from qtk.data.sequences import Sequences
from qtk.errors import CalibrationError


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
    assert sums(sim, Sequences(batches, reset=2)) == pytest.approx([1, 3, 3, 7], abs=0.01)
    four = Sequences(batches, reset=lambda given: float(given[0][0]) == 4)
    assert sums(sim, four) == pytest.approx([1, 3, 6, 4], abs=0.01)


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
    apart = Sequences([batch(1), batch(1, count=3)], reset=1)
    assert sums(sim, apart) == pytest.approx([1, 1], abs=0.01)


def test_sequences_of_what_has_no_states_are_refused():
    with pytest.raises(CalibrationError, match=r"the model has no states; name the inputs .* or register what "):
        list(outputs(nn.Linear(2, 2), Sequences([torch.zeros(1, 2)], reset=2)))


def test_every_function_that_measures_rolls(sim):
    batches = [batch(value) for value in (1, 2, 3, 4)]
    error = next(each for each in sim.compare(batches, progress=False) if each.site == "state_sum:input")
    assert error.clipped == 0
    assert error.own_sqnr_db > 60


class Cache(nn.Module):
    """A cache that grows by what it is given, and the sum of all of it; it begins with the first call, or empty."""

    def forward(self, x, past=None):
        past = x if past is None else torch.cat([past, x], 1)
        return past.sum(1), past


def cached(values, length=0):
    return torch.tensor([[float(value)] for value in values])[None].repeat(2, 1, 1), torch.zeros(2, length, 1)


def test_a_cache_grows_from_batch_to_batch_whatever_length_the_batches_bring_along():
    sim = qtk.QuantSim(Cache(), cached([1, 2], 3), dynamic_shapes="all", states={"past": 1}, activation_bits=16)
    batches = [cached([1, 2]), cached([3]), cached([4], 2)]
    sim.compute_encodings(batches, progress=False)
    found = list(outputs(sim.model, batches))
    assert [float(total[0, 0]) for total, _ in found] == pytest.approx([3, 6, 10], abs=0.01)
    assert [past.shape[1] for _, past in found] == [2, 3, 4]
    assert torch.equal(found[2][1][:, :3], found[1][1])  # codes move: nothing is rounded again
    with pytest.raises(CalibrationError, match=r"state past is \[3, 0, 1\] in this batch, and output 1 .* \[2, 2, 1\]"):
        list(outputs(sim.model, [batches[0], tuple(torch.cat([each, each[:1]]) for each in batches[1])]))


def test_what_a_variant_without_states_returns_is_carried_too():
    sim = qtk.QuantSim(Cache(), cached([1, 2], 3), dynamic_shapes="all", variants=[cached([1, 2])[:1]],
                       states={"past": 1}, activation_bits=16)
    batches = [cached([1, 2])[:1], cached([3]), cached([4])]
    sim.compute_encodings(batches, progress=False)
    assert [float(total[0, 0]) for total, _ in outputs(sim.model, batches)] == pytest.approx([3, 6, 10], abs=0.01)


def test_layerwise_methods_see_the_states_of_the_float_model(sim):
    calls = recorded_calls(sim.model, list(sim.quantizers.values()), [batch(1), batch(2), batch(3)], None, None)
    assert [float(call.args[1]["sum"][0, 0]) for call in calls] == [0, 1, 3]


class Counted(nn.Module):
    """A buffer that adds up what it is given."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1, 1, bias=False)
        self.linear.weight.data.fill_(1.0)
        self.register_buffer("total", torch.zeros(2, 1))

    def forward(self, x):
        self.total += self.linear(x)
        return self.total * 1.0


@pytest.fixture(scope="module")
def counted():
    given = [(torch.full((2, 1), float(value)),) for value in (1, 2, 3, 4)]
    made = qtk.QuantSim(Counted().eval(), given[0], activation_bits=16)
    made.compute_encodings(given, progress=False)
    return made, given


def totals(sim, given, **options):
    return [float(each[0, 0]) for each in outputs(sim.model, given, **options)]


def test_buffers_go_on_from_batch_to_batch_and_are_as_before_when_the_data_end(counted):
    sim, given = counted
    assert float(sim.encodings()["total:input"].maximum) == pytest.approx(10, abs=0.01)  # calibration rolled
    assert totals(sim, given) == pytest.approx([1, 3, 6, 10], abs=0.01)
    assert totals(sim, Sequences(given, reset=2)) == pytest.approx([1, 3, 3, 7], abs=0.01)
    assert totals(sim, given, forward=lambda model, batch: [model(*batch), model(*batch)][1]) == pytest.approx(
        [2, 6, 10, 10], abs=0.01)  # a loop of the user's own goes on too, up to the range
    run_all(sim.model, lambda model: [model(*batch) for batch in given])
    assert float(sim.model.total.abs().sum()) == 0


def test_calls_that_are_recorded_begin_with_what_the_float_model_left(counted, sim):
    quantizers = list(counted[0].quantizers.values())
    calls = recorded_calls(counted[0].model, quantizers, counted[1], None, None)
    assert [float(call.buffers["total"][0, 0]) for call in calls] == pytest.approx([0, 1, 3, 6])
    calls = recorded_calls(sim.model, list(sim.quantizers.values()), [batch(1), batch(2), batch(3)], None, None)
    assert [float(call.args[1]["sum"][0, 0]) for call in calls] == pytest.approx([0, 1, 3])


def test_what_runs_a_batch_several_times_begins_each_time_with_the_same_buffers(counted):
    sim, given = counted
    (error,) = [each for each in sim.compare(given, progress=False) if each.site == "total:input"]
    assert error.unpaired == 0
    assert error.sqnr_db > 60
    assert sim.sensitivity(given, top=3, progress=False).loss < 1e-6  # above 1 if the runs do not begin alike
    assert float(sim.model.total.abs().sum()) == 0
