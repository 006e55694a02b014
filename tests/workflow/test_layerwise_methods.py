"""Each method as a function brings the model closer to float, and passes its settings on."""

import inspect

import pytest
import torch

import qtk
from qtk.errors import CalibrationError
from qtk.layerwise.reconstruction import Reconstruction
from qtk.quantizers.quantizer import Mode
from tests.layerwise.convolutional_net import lost, problem, state

METHODS = {
    "seq_mse": qtk.apply_seq_mse,
    "gptq": qtk.apply_gptq,
    "adaround": lambda sim, data, **given: qtk.apply_adaround(sim, data, iterations=200, **given),
    "bias_correction": qtk.correct_bias,
}


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("inputs", ["asym", "symfp", "symqt"])
@pytest.mark.parametrize("method", METHODS)
def test_the_model_comes_closer_to_float(method, inputs):
    model, sim, data = problem()
    before = lost(model, sim, data)
    report = METHODS[method](sim, data, progress=False, options=qtk.LayerwiseOptions(inputs=inputs))
    assert lost(model, sim, data) < (1 if method == "bias_correction" else 0.9) * before
    assert [layer.name for layer in report.layers] == ["conv.weight", "fc1.weight", "fc2.weight"]
    sim.check()


def test_settings_reach_the_method(monkeypatch):
    seen = []
    monkeypatch.setattr(
        "qtk.workflow.layerwise_methods.apply_layerwise", lambda sim, data, methods, **options: seen.extend(methods)
    )
    qtk.apply_seq_mse(None, [], num_candidates=7, refine=True, exact=True, loss="l1")
    qtk.apply_gptq(None, [], damping=0.5, act_order=False)
    qtk.apply_adaround(None, [], iterations=3, through_activation=True)
    qtk.apply_reconstruction(None, [], iterations=3, window=2)
    assert [str(method) for method in seen] == [
        "SeqMse(num_candidates=7, refine=True, joint=False, exact=True, loss='l1')",
        "Gptq(damping=0.5, act_order=False, columns_at_once=128, scales=True)",
        "AdaRound(iterations=3, learning_rate=0.05, regularization=5.0, warm_start=0.2, "
        "through_activation=True)",
        str(Reconstruction(iterations=3, window=2)),
    ]


@pytest.mark.sample(2)
@pytest.mark.medium
@pytest.mark.parametrize("method", METHODS)
def test_what_was_found_stays_when_ranges_are_computed_again(method):
    _, sim, data = problem()
    METHODS[method](sim, data, progress=False)
    found = {name: sim.encodings()[name] for name in ("conv.weight", "fc1.weight", "fc2.weight")}
    weights = {name: parameter.clone() for name, parameter in sim.model.named_parameters()}
    sim.compute_encodings(data, progress=False)
    assert all(found[name].equals(sim.encodings()[name]) for name in found)
    assert all(torch.equal(weights[name], parameter) for name, parameter in sim.model.named_parameters())
    assert all(quantizer.mode is Mode.SIMULATE for quantizer in sim.quantizers.values())
    assert not sim.model.training


def test_every_call_has_the_same_keywords():
    calls = [qtk.apply_layerwise, qtk.apply_seq_mse, qtk.apply_gptq, qtk.apply_adaround, qtk.correct_bias,
             qtk.apply_reconstruction]
    keywords = [
        {name: (each.default, each.annotation) for name, each in inspect.signature(call).parameters.items()}
        for call in calls
    ]
    common = list(keywords[0])[3:]
    assert common == ["sites", "forward", "num_batches", "valid", "progress", "options"]
    for own in keywords:
        assert list(own)[-len(common):] == common
        assert all(own[name] == keywords[0][name] for name in common)


@pytest.mark.parametrize("method", METHODS | {"reconstruction": qtk.apply_reconstruction})
def test_keywords_reach_the_run(method, monkeypatch):
    seen = []
    monkeypatch.setattr("qtk.workflow.layerwise_methods.apply_layerwise", lambda *args, **given: seen.append(given))
    given = {"sites": "*", "forward": print, "num_batches": 3, "valid": "mask", "progress": False,
             "options": qtk.LayerwiseOptions(holdout=0.5)}
    METHODS.get(method, qtk.apply_reconstruction)(None, [], **given)
    assert seen == [given]
    assert given.keys() == set(list(inspect.signature(qtk.apply_layerwise).parameters)[3:])


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("method", [name for name in METHODS if name != "bias_correction"])
def test_every_method_holds_out_groups(method):
    """What is held out is not seen: with one group of two held out, the result is that of the other group alone."""
    _, sim, data = problem()
    _, other, _ = problem()
    options = qtk.LayerwiseOptions(groups=["a", "a", "b", "b"], holdout=0.5)
    report = METHODS[method](sim, data, options=options, progress=False)
    changed = [data[0], data[1], *(x * 1.0001 for x in data[2:])]
    METHODS[method](other, changed, options=options, progress=False)
    (own, _), (expected, _) = state(sim), state(other)
    first = [name for name in own if name.startswith("conv.")]
    assert first
    assert all(torch.equal(own[name], expected[name]) for name in first)
    assert all(layer.held_out is not None for layer in report.layers)
    with pytest.raises(CalibrationError, match="groups needs a label for each of the 4 calls"):
        METHODS[method](problem()[1], data, options=qtk.LayerwiseOptions(groups=["a", "b"]), progress=False)


def test_the_verb_refuses_before_it_starts():
    with pytest.raises(CalibrationError, match="num_candidates"):
        qtk.apply_seq_mse(None, [], num_candidates=10**8)
