"""Names of what comes out of a prepared model."""

import inspect

import pytest
import torch
from torch import nn

from qtk.calls.signature import call_kind, input_nodes, output_nodes, signature_of
from qtk.workflow.prepare import prepare_model
from tests.zoo.prepared import copied

X = torch.randn(2, 4)


def prepared(name):
    return copied(name)[1]


class Nested(nn.Module):
    def forward(self, x):
        return {"a.b": x + 1, "a": {"b": x + 2}, "pair": (x + 3, 7), "n": None}


@pytest.mark.parametrize(("model", "names"), [
    (Nested(), ["a.b", "a.b_1", "pair.0"]),
    (nn.Linear(4, 2), ["output"]),
])
def test_an_output_is_named_by_its_path(model, names):
    assert list(output_nodes(prepare_model(model, X, verify=False))) == names


def test_a_tensor_returned_twice_has_two_names():
    nodes = output_nodes(prepared("intermediate_outputs"))
    assert list(nodes) == [f"output_{index}" for index in range(4)]
    assert nodes["output_3"] is nodes["output_0"]


def test_an_input_is_named_by_its_path_whatever_its_placeholder_is_called():
    class Takes(nn.Module):
        def forward(self, x, past, *, state):
            return x + past[0][1] + state["a"] + past[1][0]

    x = torch.randn(2, 4)
    model = prepare_model(Takes(), {"x": x, "past": [(x, x), (x, 3)], "state": {"b": x, "a": x}}, verify=False)
    nodes = input_nodes(model)
    assert [*nodes] == ["x", "past.0.0", "past.0.1", "past.1.0", "state.b", "state.a"]
    assert nodes["past.0.1"].target == "past_0_1"


EXAMPLE = torch.randn(3, 4)


def kind(*args, **kwargs):
    return call_kind(None, args, kwargs)


def test_calls_of_one_kind_differ_in_sizes_and_float_widths_only():
    assert kind(EXAMPLE) == kind(EXAMPLE[:1]) == kind(EXAMPLE.half())
    others = [(EXAMPLE, {}), (EXAMPLE[0], {}), (EXAMPLE.int(), {}), (EXAMPLE.bool(), {}), ((EXAMPLE,), {}),
              (EXAMPLE, {"scale": 1.0}), (EXAMPLE, {"scale": 2.0}), (EXAMPLE, {"scale": 1}), ({"x": EXAMPLE}, {})]
    assert len({kind(args, **kwargs) for args, kwargs in others}) == len(others)


def test_the_order_of_names_does_not_matter():
    assert kind(x=EXAMPLE, y={"a": EXAMPLE, "b": 1}) == kind(y={"b": 1, "a": EXAMPLE}, x=EXAMPLE)


class Flags(nn.Module):
    def forward(self, x, /, labels=None, *rest, flag=True, **others):
        return x


@pytest.mark.parametrize(("a", "b", "equal"), [
    (((EXAMPLE,), {}), ((EXAMPLE, None), {"flag": True}), True),
    (((EXAMPLE,), {"labels": EXAMPLE}), ((EXAMPLE, EXAMPLE), {}), True),
    (((EXAMPLE,), {}), ((EXAMPLE,), {"flag": False}), False),
    (((EXAMPLE,), {}), ((EXAMPLE,), {"flag": 1}), False),
    (((EXAMPLE, None, EXAMPLE), {}), ((EXAMPLE, None), {}), False),
    (((EXAMPLE,), {"other": EXAMPLE}), ((EXAMPLE,), {}), False),
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
