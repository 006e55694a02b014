"""The step that folds one batch norm, against the batch norm itself and formulas in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qtk
from qtk.nn.scale_shift import ScaleShift
from qtk.operators.op_row import Product
from qtk.transforms.fold_batch_norm_step import FoldBatchNorm, Into, Layer, give_bias, owner_of
from qtk.transforms.result import Outcome
from tests.transforms.folding import count, folded, inputs, norms
from tests.transforms.nets import INTO_LAYERS, randomized


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("name", INTO_LAYERS)
def test_into_layers(name):
    build, shape = INTO_LAYERS[name]
    model, x = randomized(build()), inputs(shape)
    prepared, result = folded(model, x)
    other = inputs(shape, seed=2)
    torch.testing.assert_close(prepared(other), model(other), rtol=1e-10, atol=1e-12)
    assert result.groups
    assert all(group.outcome is Outcome.APPLIED for group in result.groups), str(result)
    assert norms(prepared) == count(prepared, ScaleShift) == 0
    assert not any("running" in key or "num_batches" in key for key in prepared.state_dict())


def step_into(into, product, outputs, *, groups=1, **names):
    names = {"weight": "norm.weight", "bias": "norm.bias"} | names
    layer = Layer("layer.weight", "layer.bias", product, outputs, groups)
    layers = () if into is Into.SCALE_SHIFT else (layer,)
    return FoldBatchNorm((), into, layers, mean="norm.mean", var="norm.var", eps=1e-3, scale="norm.scale",
                         shift="norm.shift", output_mean=torch.zeros(0), output_std=torch.zeros(0), **names)


def state_of(channels, weight_shape, dtype=torch.float64):
    """A batch norm with a γ of 0 and a variance of 0, and a layer with a bias."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"norm.weight": channels, "norm.bias": channels, "norm.mean": channels, "norm.var": channels,
              "layer.bias": weight_shape[0]}
    state = {name: torch.randn(length, generator=generator, dtype=dtype) for name, length in shapes.items()}
    state["norm.var"] = state["norm.var"].abs()
    state["norm.weight"][0] = state["norm.var"][-1] = 0
    state["layer.weight"] = torch.randn(weight_shape, generator=generator, dtype=dtype)
    return state


def normalized(x, state, eps=1e-3):
    """``x``, whose channels are at axis 1, through the batch norm."""
    return F.batch_norm(x, state["norm.mean"], state["norm.var"], state["norm.weight"], state["norm.bias"], eps=eps)


@pytest.mark.parametrize("channels", [1, 7])
def test_a_linear_layer_before_the_norm_takes_it_up(channels):
    state, x = state_of(channels, (channels, 3)), inputs((5, 3))
    expected = normalized(F.linear(x, state["layer.weight"], state["layer.bias"]), state)
    step_into(Into.PRODUCER, Product.OUT_IN, channels).update(state)
    torch.testing.assert_close(F.linear(x, state["layer.weight"], state["layer.bias"]), expected)


@pytest.mark.parametrize("groups", [1, 2])
def test_a_convolution_behind_the_norm_takes_it_up_and_gets_a_bias(groups):
    state, x = state_of(4, (6, 4 // groups, 3)), inputs((2, 4, 5))
    del state["layer.bias"]
    expected = F.conv1d(normalized(x, state), state["layer.weight"], groups=groups)
    step_into(Into.CONSUMERS, Product.CONV, 6, groups=groups).update(state)
    torch.testing.assert_close(F.conv1d(x, state["layer.weight"], state["layer.bias"], groups=groups), expected)


def test_without_a_layer_it_becomes_a_scale_and_a_shift_and_missing_parameters_count_as_1_and_0():
    state, x = state_of(5, (5, 3)), inputs((2, 5))
    untouched = state["layer.weight"].clone()
    expected = normalized(x, state | {"norm.weight": torch.ones(5).double(), "norm.bias": torch.zeros(5).double()})
    step_into(Into.SCALE_SHIFT, Product.OUT_IN, 5, weight=None, bias=None).update(state)
    torch.testing.assert_close(x * state["norm.scale"] + state["norm.shift"], expected)
    assert torch.equal(state["layer.weight"], untouched)


def test_a_changed_parameter_is_rounded_once():
    state = state_of(7, (7, 3), torch.bfloat16)
    wide = {name: value.double() for name, value in state.items()}
    for each in (state, wide):
        step_into(Into.PRODUCER, Product.OUT_IN, 7).update(each)
    assert torch.equal(state["layer.weight"], wide["layer.weight"].bfloat16())
    assert torch.equal(state["layer.bias"], wide["layer.bias"].bfloat16())


def test_the_members_of_a_norm_are_its_parameters_statistics_and_counter():
    step = step_into(Into.PRODUCER, Product.OUT_IN, 7, bias=None)
    assert step.tensors == ("norm.weight", "norm.mean", "norm.var", "norm.num_batches_tracked")


@pytest.mark.parametrize(("name", "owner"), [
    ("weight", "weight"), ("conv.weight", "conv"), ("blocks.0.conv.weight", "blocks.0.conv"),
])
def test_the_owner_of_a_parameter_is_the_module_that_holds_it(name, owner):
    assert owner_of(name) == owner


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_layer_that_has_no_bias_is_given_one_of_zeros(has_bias):
    model = qtk.prepare_model(nn.Linear(3, 5, bias=has_bias).double().eval(), inputs((2, 3)))
    (node,) = [node for node in model.graph.nodes if node.op == "call_function"]
    expected = model(inputs((2, 3)))
    added = give_bias(model, node, Layer("weight", "bias", Product.OUT_IN, 5), None)
    model.recompile()
    assert torch.equal(model(inputs((2, 3))), expected)
    assert (added is None) is has_bias
    if not has_bias:
        assert model.get_parameter("bias") is added
        assert added.tolist() == [0] * 5
