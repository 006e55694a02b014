"""Calls of submodules are recorded as they were made, on tensors of their own."""

import pytest
import torch
from torch import nn

import qtk
from qtk.calls.call_recording import Recorded, record_calls, recording
from qtk.calls.calls import Call
from qtk.workflow.prepare import prepare_model


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, *, scale=1.0):
        return {"y": self.fc(x) * scale}


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.last = Inner(), nn.ReLU()

    def forward(self, x):
        y = self.inner(x, scale=2.0)["y"]
        z = self.inner(y[:1])["y"]
        return self.last(z)


X = torch.randn(3, 4)
CALL = Call((X,), {}, None)


def test_direct_calls_alone_are_recorded_in_order_with_arguments_and_results():
    model = Outer()
    calls = record_calls(model, [CALL])
    assert list(calls) == [model.inner, model.last]
    first, second = calls[model.inner]
    assert (first.kwargs, second.kwargs) == ({"scale": 2.0}, {})
    assert torch.equal(first.args[0], X)
    assert torch.equal(first.output["y"], model.inner.fc(X) * 2)
    assert second.args[0].shape == (1, 4)
    assert torch.equal(second.args[0], first.output["y"][:1])


def test_every_example_is_run():
    model = Outer()
    calls = record_calls(model, [CALL, Call((X[:2],), {}, None)])
    assert [len(call.args[0]) for call in calls[model.inner]] == [3, 1, 2, 1]


def test_chosen_modules_are_recorded_wherever_they_are():
    model = Outer()
    calls = record_calls(model, [CALL], of=[model.inner.fc])
    assert [len(call.args[0]) for call in calls[model.inner.fc]] == [3, 1]


def test_what_is_recorded_does_not_change_when_the_model_writes_in_place():
    class Writes(nn.Module):
        def forward(self, x):
            return x.mul_(2)

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.writes, self.more = Writes(), Writes()

        def forward(self, x):
            return self.more(self.writes(x))

    x, model = X.clone(), Around()
    calls = record_calls(model, [Call((x,), {}, None)])
    assert torch.equal(x, X)
    assert torch.equal(calls[model.writes][0].args[0], X)
    assert torch.equal(calls[model.writes][0].output, X * 2)
    assert torch.equal(calls[model.more][0].args[0], X * 2)


def test_no_hook_stays_even_if_the_model_fails():
    class Fails(Outer):
        def forward(self, x):
            super().forward(x)
            raise ValueError

    for model in (Outer(), Fails()):
        try:
            record_calls(model, [CALL])
        except ValueError:
            assert isinstance(model, Fails)
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_call_that_raises_and_is_caught_is_left_out_and_hides_none_after_it():
    class Refuses(nn.Module):
        def forward(self, x):
            raise KeyError

    class Tries(nn.Module):
        def __init__(self):
            super().__init__()
            self.fast, self.slow = nn.Sequential(nn.ReLU(), Refuses()), nn.Linear(4, 4)

        def forward(self, x):
            try:
                return self.fast(x)
            except KeyError:
                return self.slow(x)

    model = Tries()
    assert list(record_calls(model, [CALL, CALL])) == [model.slow]
    try:
        raise ValueError
    except ValueError:  # which none of the calls below raises
        assert [len(calls) for calls in record_calls(Outer(), [CALL]).values()] == [2, 1]


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_scripted_modules_are_passed_over():
    model = nn.Sequential(torch.jit.script(nn.Linear(4, 4)), nn.ReLU())
    assert list(record_calls(model, [CALL])) == [model[1]]


@pytest.mark.parametrize("run", [True, False])
def test_calls_made_by_the_body_are_collected_with_tensors_of_their_own(run):
    model = nn.Linear(4, 4)
    with recording(model, run=run) as calls:
        x = X.clone()
        if run:
            model(x)
        else:
            with pytest.raises(Recorded):
                model(x)
        x.zero_()
    assert torch.equal(calls[0].args[0], X)
    assert not model._forward_pre_hooks


def prepared():
    return prepare_model(nn.Linear(4, 2).eval(), X, verify=False)


def test_without_running_a_call_ends_through_whatever_the_user_catches():
    model = prepared()

    def as_a_user_might():
        try:
            model(X)
        except Exception:
            return

    with recording(model, run=False) as calls, pytest.raises(Recorded):
        as_a_user_might()
    assert len(calls) == 1


def test_afterwards_nothing_is_recorded_even_after_an_error():
    model = prepared()
    with pytest.raises(KeyError), recording(model, run=False) as calls:
        raise KeyError
    assert model(X).shape == (3, 2)
    assert calls == []


def test_calls_of_the_graph_for_another_kind_of_call_are_recorded():
    class Masked(nn.Module):
        def forward(self, x, mask=None):
            return x if mask is None else x * mask

    model = prepare_model(Masked(), X, verify=False)
    other = prepare_model(Masked(), (X, X), verify=False)
    model.meta["qtk_variants"] = {"with a mask": other}
    with recording(model, run=True) as calls:
        other(X, X)
    assert [len(call.args) for call in calls] == [2]


class Memo:
    keys = None


class Filling(nn.Module):
    """Computes once what the object that it is given does not hold yet, as attention with a cache does."""

    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, memo):
        if memo.keys is None:
            memo.keys = self.key(x)
        return torch.relu(self.query(x)) * memo.keys


class Returning(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Filling()

    def forward(self, x):
        memo = Memo()
        return self.attention(x, memo), memo


def test_a_recorded_argument_is_what_it_was_before_the_call_filled_it():
    model, x = Returning().eval(), torch.randn(4, 8)
    (call,) = record_calls(model, [Call((x,), {}, None)], of=[model.attention])[model.attention]
    assert call.args[1].keys is None
    sim = qtk.QuantSim(model, x)
    sim.compute_encodings([x], progress=False)
    assert {"attention.key.weight", "attention.query.weight"} <= set(sim.encodings())
