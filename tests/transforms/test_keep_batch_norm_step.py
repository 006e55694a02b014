"""The step that keeps a batch norm live: the function in both modes, and the sites of the folded model."""

import pytest
import torch
from torch import nn

import qtk
from qtk.nn.kept_batch_norm import own_bias, unscaled_weight
from qtk.operators.lookup import row_of
from qtk.operators.targets import batch_norm_called, kept_batch_norm_called
from qtk.transforms.graph_editor import weight_parameter
from qtk.transforms.keep_batch_norm_step import movement_behind, unfolded_targets, weight_quantizer
from qtk.transforms.keep_batch_norms import is_kept
from qtk.transforms.result import Outcome
from tests.transforms.folding import inputs
from tests.transforms.keeping import AT_EXPORT, KEPT, calls, kept
from tests.transforms.nets import INTO_LAYERS, ReadTwice, randomized


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("name", KEPT)
def test_the_function_is_kept_in_both_modes(name):
    build, shape = INTO_LAYERS[name]
    model, x = randomized(build()), inputs(shape)
    prepared, result = kept(model, x)
    assert result.groups
    assert all(group.outcome is Outcome.APPLIED for group in result.groups), str(result)
    assert calls(prepared, batch_norm_called) == 0 < calls(prepared, kept_batch_norm_called)
    assert list(prepared.state_dict()) == list(model.state_dict())
    other = inputs(shape, seed=2)
    torch.testing.assert_close(prepared(other), model(other), rtol=1e-10, atol=1e-12)
    gradients = []
    for each in (prepared.train(), model.train()):
        each(other).square().sum().backward()
        gradients.append({name: p.grad for name, p in each.named_parameters()})
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(dict(prepared.state_dict()), dict(model.state_dict()), rtol=1e-10, atol=1e-12)
    prepared.eval(), model.eval()
    torch.testing.assert_close(prepared(other), model(other), rtol=1e-10, atol=1e-12)


@pytest.mark.sample(4)
@pytest.mark.medium
@pytest.mark.parametrize("target", ["onnxruntime", *(pytest.param(target, marks=pytest.mark.slow) for target in (
    "default", "dynamic"))])
@pytest.mark.parametrize("name", KEPT)
def test_the_plan_is_that_of_the_folded_model(name, target):
    build, shape = INTO_LAYERS[name]
    model, x = randomized(build()).float(), inputs(shape, dtype=torch.float32)
    config = {"version": 1, "extends": target}
    first = qtk.QuantSim(model, x, config=config)
    live = qtk.QuantSim(model, x, config=config | {"fold_batch_norms": "at_export"})
    assert str(live.plan) == str(first.plan)
    assert list(live.quantizers) == list(first.quantizers)
    assert is_kept(live.model)


def test_a_name_that_a_quantizer_reads_is_that_of_the_folded_layer():
    model, x = randomized(INTO_LAYERS["conv2d"][0]()).float(), inputs((2, 4, 6, 6), dtype=torch.float32)
    sim = qtk.QuantSim(model, x, config=AT_EXPORT)
    sim.compute_encodings([x], progress=False)
    norm, weight = model[1], model[0].weight
    scaled = weight * (norm.weight / (norm.running_var + norm.eps).sqrt())[:, None, None, None]
    expected = torch.maximum(scaled.flatten(1).amax(1) / 127, scaled.flatten(1).amin(1) / -128)
    torch.testing.assert_close(sim.encodings()["0.weight"].scale, expected.detach())
    assert list(sim.encodings()) == ["input:input", "0.weight", "0:out"]


@pytest.mark.medium
@pytest.mark.parametrize(("between", "expected"), [
    (nn.Identity(), []), (nn.Flatten(2), ["reshape"]),
    (nn.Sequential(nn.Flatten(2), nn.Unflatten(2, (4, 4))), ["reshape"] * 2),
    (nn.ReLU(), None), (nn.ZeroPad2d(1), None), (nn.MaxPool2d(2), None),
])
def test_movement_between_a_layer_and_its_norm_keeps_every_value_once(between, expected):
    norm = nn.BatchNorm1d(5) if isinstance(between, nn.Flatten) else nn.BatchNorm2d(5)
    model = qtk.prepare_model(nn.Sequential(nn.Conv2d(4, 5, 3), between, norm).eval(), torch.randn(2, 4, 6, 6))
    (layer,) = [node for node in model.graph.nodes if weight_parameter(node) is not None]
    found = movement_behind(layer)
    assert (None if found is None else [row_of(node).kind for node in found]) == expected


def test_a_layer_that_another_op_reads_or_no_norm_follows_has_no_norm_behind_it():
    for build in (ReadTwice, lambda: nn.Conv2d(4, 4, 1)):
        model = qtk.prepare_model(build().eval(), torch.randn(2, 4, 6, 6))
        (layer,) = [node for node in model.graph.nodes if weight_parameter(node) is not None]
        assert movement_behind(layer) is None


@pytest.mark.medium
def test_a_kept_norm_knows_the_quantizer_of_the_weight_in_front_and_what_a_layer_that_is_never_folded_calls():
    model, x = randomized(INTO_LAYERS["conv2d"][0]()).float(), inputs((2, 4, 6, 6), dtype=torch.float32)
    live = qtk.QuantSim(model, x, config=AT_EXPORT)
    (norm,) = [node for node in live.model.graph.nodes if kept_batch_norm_called(node) is not None]
    assert weight_quantizer(norm) is live.quantizers["0.weight"]
    assert list(unfolded_targets(norm).values()) == [unscaled_weight, own_bias]
    prepared = qtk.prepare_model(model, x)
    (plain,) = [node for node in prepared.graph.nodes if batch_norm_called(node) is not None]
    assert weight_quantizer(plain) is None
    assert unfolded_targets(plain) == {}
