"""The kind of a call: what is given, of which rank, dtype and value, however it is written."""

import inspect

import pytest
import torch
from torch import nn

from qtk.calls.call_kind import call_kind, signature_of

X = torch.randn(3, 4)


def kind(*args, **kwargs):
    return call_kind(None, args, kwargs)


def test_calls_of_one_kind_differ_in_sizes_and_float_widths_only():
    assert kind(X) == kind(X[:1]) == kind(X.half())
    others = [(X, {}), (X[0], {}), (X.int(), {}), (X.bool(), {}), ((X,), {}), (X, {"scale": 1.0}), (X, {"scale": 2.0}),
              (X, {"scale": 1}), ({"x": X}, {})]
    assert len({kind(args, **kwargs) for args, kwargs in others}) == len(others)


def test_the_order_of_names_does_not_matter():
    assert kind(x=X, y={"a": X, "b": 1}) == kind(y={"b": 1, "a": X}, x=X)


class Flags(nn.Module):
    def forward(self, x, /, labels=None, *rest, flag=True, **others):
        return x


@pytest.mark.parametrize(("a", "b", "equal"), [
    (((X,), {}), ((X, None), {"flag": True}), True),
    (((X,), {"labels": X}), ((X, X), {}), True),
    (((X,), {}), ((X,), {"flag": False}), False),
    (((X,), {}), ((X,), {"flag": 1}), False),
    (((X, None, X), {}), ((X, None), {}), False),
    (((X,), {"other": X}), ((X,), {}), False),
])
def test_defaults_given_are_defaults_left_out(a, b, equal):
    signature = signature_of(Flags())
    assert (call_kind(signature, *a) == call_kind(signature, *b)) is equal


def test_code_that_is_no_python_has_no_signature():
    module = nn.Linear(2, 2)
    assert list(signature_of(module).parameters) == ["input"]
    module.forward = inspect.signature  # has one
    assert signature_of(module) is not None
    module.forward = dict
    assert signature_of(module) is None
