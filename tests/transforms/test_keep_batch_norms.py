"""Keeping batch norms keeps the function in both modes; the plan is that of the folded model; folding is exact."""

import copy

import pytest
import torch
from torch import nn

import qtk
from qtk.graph.graphs import graphs
from qtk.graph.targets import batch_norm_called, kept_batch_norm_called
from qtk.transforms import keep_batch_norms as transform
from qtk.transforms.keep_batch_norms import as_folded, fold_kept, folded, is_kept, keep_batch_norms
from qtk.transforms.result import Outcome
from tests.transforms.nets import INTO_LAYERS, INTO_SCALE_SHIFT, randomized

KEPT = [name for name in INTO_LAYERS if "before" not in name and name not in ("both_sides", "some_tokens")]
LEFT = {
    "before_linear": "into 1, behind it", "some_tokens": "an op that drops or repeats values stands between it and fc",
    **{name: reason for name, (_, _, reason) in INTO_SCALE_SHIFT.items()},
}
AT_EXPORT = {"version": 1, "extends": "default", "fold_batch_norms": "at_export"}


def inputs(shape, seed=1, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def kept(model, x):
    prepared = qtk.prepare_model(copy.deepcopy(model), x)
    return prepared, keep_batch_norms(prepared, prepared.example)


def calls(model, find):
    return sum(find(node) is not None for graph in graphs(model).values() for node in graph.graph.nodes)


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


@pytest.mark.parametrize("name", LEFT)
def test_others_stay_operators_and_the_reason_is_named(name):
    build, shape = (INTO_LAYERS | {key: value[:2] for key, value in INTO_SCALE_SHIFT.items()})[name]
    model, x = randomized(build()), inputs(shape)
    prepared, result = kept(model, x)
    assert not is_kept(prepared)
    assert result.skipped
    assert any(qtk_reason in str(result) for qtk_reason in LEFT[name].split("|")), str(result)
    assert torch.equal(prepared(x), model(x))


@pytest.mark.parametrize("target", ["default", "onnxruntime", "dynamic"])
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


@pytest.mark.parametrize("target", ["default", "onnxruntime"])
@pytest.mark.parametrize("name", KEPT)
def test_folding_a_calibrated_simulation_changes_no_bit(name, target):
    build, shape = INTO_LAYERS[name]
    model, x = randomized(build()).float(), inputs(shape, dtype=torch.float32)
    sim = qtk.QuantSim(model, x, config={"version": 1, "extends": target, "fold_batch_norms": "at_export"})
    sim.compute_encodings([x], progress=False)
    before, state, encodings = sim.model(x), sim.model.state_dict(), sim.encodings()
    with folded(sim.simulation) as deployed:
        assert torch.equal(deployed.model(x), before)
        assert not any("running" in name for name in deployed.model.state_dict())
    assert list(sim.model.state_dict()) == list(state)
    assert torch.equal(sim.model(x), before)
    for quantizer in sim.quantizers.values():
        quantizer.mode = qtk.Mode.BYPASS
    unrounded = sim.model(x)
    with folded(sim.simulation) as deployed:
        assert torch.equal(deployed.model(x), unrounded)
    for quantizer in sim.quantizers.values():
        quantizer.mode = qtk.Mode.SIMULATE
    result = qtk.fold_batch_norms(sim)
    assert len(result.applied) == len(result.groups)
    assert torch.equal(sim.model(x), before)
    assert list(sim.encodings()) == list(encodings)
    assert all(torch.equal(sim.encodings()[name].scale, encoding.scale) for name, encoding in encodings.items())


def test_a_name_that_a_quantizer_reads_is_that_of_the_folded_layer():
    model, x = randomized(INTO_LAYERS["conv2d"][0]()).float(), inputs((2, 4, 6, 6), dtype=torch.float32)
    sim = qtk.QuantSim(model, x, config=AT_EXPORT)
    sim.compute_encodings([x], progress=False)
    norm, weight = model[1], model[0].weight
    scaled = weight * (norm.weight / (norm.running_var + norm.eps).sqrt())[:, None, None, None]
    expected = torch.maximum(scaled.flatten(1).amax(1) / 127, scaled.flatten(1).amin(1) / -128)
    torch.testing.assert_close(sim.encodings()["0.weight"].scale, expected.detach())
    assert list(sim.encodings()) == ["input:input", "0.weight", "0:out"]


def test_an_error_while_it_is_folded_leaves_it_kept():
    model, x = randomized(INTO_LAYERS["conv2d"][0]()).float(), inputs((2, 4, 6, 6), dtype=torch.float32)
    sim = qtk.QuantSim(model, x, config=AT_EXPORT)
    sim.compute_encodings([x], progress=False)
    before = sim.model(x)
    with pytest.raises(ZeroDivisionError), folded(sim.simulation):
        raise ZeroDivisionError
    assert is_kept(sim.model)
    assert torch.equal(sim.model(x), before)
    prepared, _ = kept(model, x)
    with pytest.raises(ZeroDivisionError), as_folded(prepared):
        raise ZeroDivisionError
    assert is_kept(prepared)


def test_a_wrong_formula_is_undone(monkeypatch):
    """The proof runs the model with the computed weights."""
    model, x = randomized(INTO_LAYERS["conv2d"][0]()), inputs((2, 4, 6, 6))
    from qtk.transforms import keep_batch_norm_step

    monkeypatch.setattr(keep_batch_norm_step, "folded_bias", lambda bias, weight, shift, *_: shift)
    prepared, result = kept(model, x)
    assert len(result.undone) == 1
    assert not is_kept(prepared)
    assert torch.equal(prepared(x), model(x))


def test_nothing_kept_is_nothing_to_fold():
    x = inputs((2, 4), dtype=torch.float32)
    sim = qtk.QuantSim(nn.Linear(4, 2).eval(), x, config=AT_EXPORT)
    assert transform.is_kept(sim.model) is False
    with folded(sim.simulation) as same:
        assert same is sim.simulation
    assert fold_kept(sim.simulation)[1].groups == ()
