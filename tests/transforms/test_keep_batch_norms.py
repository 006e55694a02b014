"""Keeping batch norms: what is left as it is and why, and folding in the end, which is exact."""

import pytest
import torch
from torch import nn

import qtk
from qtk.transforms import keep_batch_norms as transform
from qtk.transforms.keep_batch_norms import as_folded, fold_kept, folded, is_kept
from tests.transforms.folding import inputs
from tests.transforms.keeping import AT_EXPORT, KEPT, kept
from tests.transforms.nets import INTO_LAYERS, INTO_SCALE_SHIFT, randomized

LEFT = {
    "before_linear": "into 1, behind it", "some_tokens": "an op that drops or repeats values stands between it and fc",
    **{name: reason for name, (_, _, reason) in INTO_SCALE_SHIFT.items()},
}


@pytest.mark.medium
@pytest.mark.sample(5)
@pytest.mark.parametrize("name", LEFT)
def test_others_stay_operators_and_the_reason_is_named(name):
    build, shape = (INTO_LAYERS | {key: value[:2] for key, value in INTO_SCALE_SHIFT.items()})[name]
    model, x = randomized(build()), inputs(shape)
    prepared, result = kept(model, x)
    assert not is_kept(prepared)
    assert result.skipped
    assert any(qtk_reason in str(result) for qtk_reason in LEFT[name].split("|")), str(result)
    assert torch.equal(prepared(x), model(x))


@pytest.mark.sample(1)
@pytest.mark.medium
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


@pytest.mark.medium
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
