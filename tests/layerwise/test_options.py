"""The value with what layer-wise verbs share: its values are checked where it is made, and it reaches the run."""

import dataclasses

import pytest
import torch
from torch import nn

import qtk
from qtk.errors import ArgumentError
from qtk.layerwise.options import LayerwiseOptions

VERBS = {
    "apply_seq_mse": qtk.apply_seq_mse, "apply_gptq": qtk.apply_gptq, "apply_adaround": qtk.apply_adaround,
    "correct_bias": qtk.correct_bias,
    "apply_layerwise": lambda sim, data, **given: qtk.apply_layerwise(sim, data, "gptq", **given),
}


@pytest.mark.parametrize(("name", "value", "said"), [
    ("inputs", "sym", "inputs must be one of 'asym', 'symfp', 'symqt', got 'sym'"),
    ("offload", "gpu", "offload must be one of 'none', 'cpu', 'disk', got 'gpu'"),
    ("checkpoint_dir", 3, "checkpoint_dir must be a str, path or None, got 3"),
    ("holdout", "half", "holdout must be a float, got 'half'"),
    ("holdout", 1.5, "holdout is a fraction, at least 0 and below 1, got 1.5"),
    ("holdout", -0.1, "holdout is a fraction, at least 0 and below 1, got -0.1"),
    ("start", "anew", "start must be one of 'float', 'present' or None, got 'anew'"),
])
def test_a_wrong_value_is_named_where_it_is_given(name, value, said):
    with pytest.raises(ArgumentError, match=f"^LayerwiseOptions: {said}$"):
        LayerwiseOptions(**{name: value})


@pytest.mark.parametrize("verb", VERBS)
def test_a_field_given_to_a_verb_is_told_where_it_is(verb):
    for field in dataclasses.fields(LayerwiseOptions):
        with pytest.raises(TypeError, match=rf"^{verb}: .* '{field.name}'; {field.name} is a field of options, pass "
                                            rf"options=LayerwiseOptions\({field.name}=…\); its signature is {verb}\("):
            VERBS[verb](None, [], **{field.name: None})


def test_it_cannot_be_changed():
    options = qtk.LayerwiseOptions(holdout=0.5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.holdout = 0.1
    assert (options.holdout, options.offload) == (0.5, "none")


@pytest.mark.medium
def test_options_reach_the_run(tmp_path, monkeypatch):
    """Every field acts: the run of another value leaves another trace."""
    torch.manual_seed(0)
    data = list(torch.randn(2, 64, 16) @ torch.randn(16, 16))
    model = qtk.prepare_model(nn.Sequential(nn.Linear(16, 8)).eval(), data[0])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def run(**given):
        sim = qtk.QuantSim(model, data[0], weight_bits=3)
        report = qtk.apply_gptq(sim, data, options=LayerwiseOptions(**given), progress=False)
        return sim, report.layers[0]

    sim, layer = run()
    assert layer.held_out is not None
    assert sim.quantizers["0.weight"].original is not None
    assert run(holdout=0.0)[1].held_out is None
    assert run(holdout=0.5, groups=["a", "b"])[1] != layer
    assert run(inputs="symfp")[1] != layer
    assert run(keep_originals=False)[0].quantizers["0.weight"].original is None
    run(checkpoint_dir=tmp_path / "run")
    assert (tmp_path / "run" / "0000.safetensors").is_file()
    held, _ = run(offload="disk")
    assert sum(path.name.startswith("qtk-") for path in tmp_path.iterdir()) == 1
    for start, restarted in (("present", ()), ("float", ("0.weight",))):
        report = qtk.apply_gptq(held, data, options=LayerwiseOptions(start=start), progress=False)
        assert report.restarted == restarted
