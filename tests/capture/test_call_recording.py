"""The calls of a prepared model, as copies of their arguments."""

import pytest
import torch
from torch import nn

from qtk.capture.call_recording import Recorded, recording
from qtk.workflow.prepare import prepare_model

X = torch.randn(3, 4)


def prepared():
    return prepare_model(nn.Linear(4, 2).eval(), X, verify=False)


def test_calls_are_recorded_with_tensors_of_their_own_and_return():
    model, given = prepared(), X.clone()
    with recording(model, run=True) as calls:
        assert model(given).shape == (3, 2)
        given.zero_()
        model(input=X[:1])
    first, second = ([*call.args, *call.kwargs.values()] for call in calls)
    assert torch.equal(*first, X)
    assert torch.equal(*second, X[:1])
    assert all(call.output is None for call in calls)


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
