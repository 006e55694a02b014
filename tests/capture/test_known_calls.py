"""A call of a kind that was checked is served by the same graph; any other is checked."""

import copy
import pickle

import pytest
import torch
from torch import nn

import qtk
from qtk.capture import prepared_model
from qtk.capture.known_calls import KnownCalls
from qtk.errors import CaptureError


class Net(nn.Module):
    def forward(self, x, y=None, flag=True, scale=1.0):
        x = x * scale if flag else -x
        return x if y is None else x - 2 * y


def prepared():
    x = torch.randn(3, 4)
    return qtk.prepare_model(Net().eval(), (x, x + 1), variants=[{"x": x}])


def test_a_known_call_is_checked_no_more(monkeypatch):
    model, x = prepared(), torch.randn(5, 4)
    expected = model(x, x + 1), model(x), model(y=x + 1, x=x)
    monkeypatch.setattr(prepared_model, "check_inputs", None)
    assert torch.equal(model(x, x + 1), expected[0])
    assert torch.equal(model(x[:2]), expected[1][:2])
    assert torch.equal(model(y=x + 1, x=x), expected[2])
    assert torch.equal(model(y=x, x=x + 1), (x + 1) - 2 * x)


def test_a_default_that_is_passed_is_known_too(monkeypatch):
    """As generate() passes ``logits_to_keep=0``."""
    model, x = prepared(), torch.randn(5, 4)
    expected = model(x=x, flag=True, scale=1.0)
    with monkeypatch.context() as patched:
        patched.setattr(prepared_model, "check_inputs", None)
        assert torch.equal(model(x=x[:2], flag=True, scale=1.0), expected[:2])
    with pytest.raises(CaptureError, match="scale"):
        model(x=x, flag=True, scale=2.0)


def test_one_tensor_twice_is_not_remembered():
    model, x = prepared(), torch.randn(5, 4)
    model(y=x, x=x)
    assert torch.equal(model(y=x, x=x + 1), (x + 1) - 2 * x)


@pytest.mark.parametrize("call", [{"x": torch.ones(3, 5)}, {"x": torch.ones(3)}, {"x": torch.ones(3, 4).long()},
                                  {"x": torch.ones(3, 4), "flag": False}, {"x": torch.ones(3, 4), "scale": 2.0}])
def test_other_sizes_kinds_and_constants_are_still_refused(call):
    model = prepared()
    model(x=torch.ones(3, 4))
    model(x=torch.ones(3, 4), flag=True)
    with pytest.raises(CaptureError):
        model(**call)


def test_a_copy_or_pickle_knows_no_calls():
    calls = KnownCalls()
    calls._calls.append("a call")
    assert [each._calls for each in (copy.deepcopy(calls), pickle.loads(pickle.dumps(calls)))] == [[], []]
    model, x = prepared(), torch.randn(3, 4)
    model(x)
    copied = copy.deepcopy(model)
    assert torch.equal(copied(x), model(x))


class Line(nn.Module):
    def forward(self, x, scale, shift):
        return x * scale + shift


def test_one_constant_twice_is_not_taken_for_another():
    x = torch.ones(3)
    model = qtk.prepare_model(Line().eval(), (x, 2, 2))
    assert torch.equal(model(x, 2, 2), x * 4)
    for scale, shift in ((3, 2), (2, 3)):
        with pytest.raises(CaptureError):
            model(x, scale, shift)
