"""Names of what comes out of a prepared model."""

import pytest
import torch
from torch import nn

from qtk.calls.signature import input_nodes, output_nodes
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
