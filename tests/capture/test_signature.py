"""Names and order of what goes into a prepared model and comes out of it."""

import pytest
import torch
from torch import nn

from qtk.capture.signature import input_leaves, input_names, output_nodes
from qtk.errors import ExportError
from qtk.workflow.prepare import prepare_model
from tests.zoo.models import ZOO

X = torch.randn(2, 4)


def prepared(name):
    return prepare_model(ZOO[name].model(), ZOO[name].inputs(), verify=False)


def test_the_leaves_of_a_call_stand_in_the_order_of_the_placeholders():
    model, inputs = prepared("keyword_input"), ZOO["keyword_input"].inputs()
    turned = dict(reversed(inputs.items()))
    by_name = dict(zip(input_names(model), input_leaves(model, (), turned), strict=True))
    assert set(by_name) == set(inputs)
    assert all(by_name[name] is value for name, value in inputs.items())


def test_nested_arguments_are_flat():
    model, (pair, options, scale, flag) = prepared("nested_input"), ZOO["nested_input"].inputs()
    leaves = input_leaves(model, (pair, options, scale, flag), {})
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    assert all(a is b for a, b in zip(tensors, [*pair, options["extra"]], strict=True))
    assert leaves[-2:] == [3, True]


@pytest.mark.parametrize("count", [1, 3])
def test_other_arguments_are_refused_with_the_names(count):
    model = prepared("two_inputs")
    for args, kwargs in (((X,) * count, {}), (([X] * count,), {}), ((), {"image": X, "picture": X})):
        with pytest.raises(ExportError, match=r"\(image, vector\)"):
            input_leaves(model, args, kwargs)


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
