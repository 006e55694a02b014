"""Layer-wise methods as users call them."""

import inspect
import signal

import pytest
import torch
from torch import nn
from torch.nn import functional

import qtk
from qtk.errors import ArgumentError, CalibrationError, CaptureError, ConfigError
from qtk.layerwise import run
from qtk.layerwise.weighted_layers import weighted_layers
from qtk.quantizers.quantizer import Mode
from tests.zoo.models import ZOO
from tests.zoo.prepared import pair, slow_but

METHODS = {
    "seq_mse": qtk.apply_seq_mse,
    "gptq": qtk.apply_gptq,
    "adaround": lambda sim, data, **options: qtk.apply_adaround(sim, data, iterations=200, **options),
    "bias_correction": qtk.correct_bias,
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 6, 3)
        self.fc1, self.fc2 = nn.Linear(54, 24), nn.Linear(24, 5)

    def forward(self, x):
        return self.fc2(functional.gelu(self.fc1(functional.relu(self.conv(x)).flatten(1))))


def problem(**settings):
    torch.manual_seed(0)
    model = Net().eval()
    data = [torch.randn(32, 2, 5, 5) + 0.5 for _ in range(4)]
    settings = {"weight_bits": 3, "activation_bits": 8, **settings}
    sim = qtk.QuantSim(model, data[0], **settings)
    sim.compute_encodings(data, progress=False)
    return model, sim, data


@torch.no_grad()
def lost(model, sim, data):
    return float(sum((model(x) - sim.model(x)).square().sum() for x in data))


@pytest.mark.parametrize("inputs", ["asym", "symfp", "symqt"])
@pytest.mark.parametrize("method", METHODS)
def test_the_model_comes_closer_to_float(method, inputs):
    model, sim, data = problem()
    before = lost(model, sim, data)
    report = METHODS[method](sim, data, inputs=inputs, progress=False)
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
    assert [str(method) for method in seen] == [
        "SeqMse(num_candidates=7, refine=True, joint=False, exact=True, loss='l1')",
        "Gptq(damping=0.5, act_order=False, columns_at_once=128)",
        "AdaRound(iterations=3, learning_rate=0.05, regularization=5.0, warm_start=0.2, "
        "through_activation=True)",
    ]


def test_methods_in_one_walk():
    model, sim, data = problem()
    alone = problem()[1]
    qtk.apply_gptq(alone, data, progress=False)
    qtk.apply_layerwise(sim, data, ["seq_mse(num_candidates=30)", "gptq", "bias_correction"], progress=False)
    assert lost(model, sim, data) < lost(model, alone, data)


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


def test_a_fresh_sim_gets_its_ranges_first():
    torch.manual_seed(0)
    model, data = Net().eval(), [torch.randn(8, 2, 5, 5) for _ in range(2)]
    sim = qtk.QuantSim(model, data[0], weight_bits=4)
    qtk.apply_seq_mse(sim, data, progress=False)
    assert set(sim.encodings()) == {"conv.weight", "fc1.weight", "fc2.weight"}
    sim.compute_encodings(data, progress=False)
    sim.check()


def test_the_float_model_is_not_touched_and_rounded_weights_lie_on_their_grid():
    model, sim, data = problem()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    qtk.apply_gptq(sim, data, progress=False)
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    for name in ("conv.weight", "fc1.weight", "fc2.weight"):
        weight = sim.model.get_parameter(name).detach()
        assert not torch.equal(weight, before[name])
        assert torch.equal(sim.quantizers[name](weight), weight)


def test_the_report_says_what_the_outputs_are_worth():
    model, sim, data = problem(activation_bits=None)
    report = qtk.apply_gptq(sim, data, progress=False)
    with torch.no_grad():  # the last layer's output is the model's
        signal = sum(float(model(x).square().sum()) for x in data)
    last = report.layers[-1]
    assert last.signal == pytest.approx(signal, rel=1e-5)
    assert last.noise == pytest.approx(lost(model, sim, data), rel=1e-4)
    assert last.sqnr_before_db < last.sqnr_db
    assert f"{last.sqnr_db:.1f} dB" in str(report)
    fresh = problem(activation_bits=None)[1]
    for name in ("conv", "fc1"):  # up to the last layer all is as in the first walk
        fresh.model.load_state_dict({**fresh.model.state_dict(), **{
            key: value for key, value in sim.model.state_dict().items() if key.startswith(f"{name}.")}})
    assert last.noise + last.before - last.after == pytest.approx(lost(model, fresh, data), rel=1e-3)


def test_only_the_named_sites_change():
    model, sim, data = problem()
    report = qtk.apply_gptq(sim, data, sites="fc*.weight", progress=False)
    assert [layer.name for layer in report.layers] == ["fc1.weight", "fc2.weight"]
    assert torch.equal(sim.model.get_parameter("conv.weight"), model.conv.weight)
    assert not sim.quantizers["conv.weight"].frozen


def test_frozen_encodings_are_left():
    _, sim, data = problem()
    sim.freeze("fc1.weight")
    before = sim.encodings()["fc1.weight"]
    report = qtk.apply_seq_mse(sim, data, progress=False)
    assert "frozen" in report.skipped["fc1.weight"]
    assert "fc1.weight  left as it is" in str(report)
    assert before.equals(sim.encodings()["fc1.weight"])
    qtk.apply_gptq(sim, data, progress=False)  # keeps the encoding, so it may
    assert before.equals(sim.encodings()["fc1.weight"])


def test_loaders_of_pairs_and_functions_that_run_the_model():
    sims = [problem()[1] for _ in range(3)]
    data = problem()[2]
    qtk.apply_seq_mse(sims[0], data, progress=False)
    qtk.apply_seq_mse(
        sims[1], [(x, 0) for x in data], forward=lambda model, batch: model(batch[0]).argmax(1), progress=False
    )
    qtk.apply_seq_mse(sims[2], lambda model: [model(x) for x in data], progress=False)
    for other in sims[1:]:
        assert all(own.equals(other.encodings()[name]) for name, own in sims[0].encodings().items())
    few = problem()[1]
    qtk.apply_seq_mse(few, data, num_batches=1, progress=False)
    assert not few.encodings()["fc1.weight"].equals(sims[0].encodings()["fc1.weight"])


def test_bad_input_is_refused_and_changes_nothing():
    _, sim, data = problem()
    before = {name: value.clone() for name, value in sim.model.state_dict().items()}
    broken = [data[0], torch.full_like(data[0], torch.nan)]
    for given, words in (([], "no batches"), (broken, "NaN or infinity"), ([torch.randn(2, 3)], "shape")):
        with pytest.raises(CalibrationError, match=words) if words != "shape" else pytest.raises(qtk.QtkError):
            qtk.apply_gptq(sim, given, progress=False)
    with pytest.raises(ConfigError, match="did you mean 'seq_mse'"):
        qtk.apply_layerwise(sim, data, ["seqmse"])
    with pytest.raises(ConfigError, match="unknown setting 'candidates'"):
        qtk.apply_layerwise(sim, data, ["seq_mse(candidates=3)"])
    with pytest.raises(CalibrationError, match="no methods"):
        qtk.apply_layerwise(sim, data, [])
    with pytest.raises(CalibrationError, match="no site is called 'fc3"):
        qtk.apply_gptq(sim, data, sites="fc3.weight")
    with pytest.raises(CalibrationError, match="num_candidates"):
        qtk.apply_seq_mse(sim, data, num_candidates=0)
    with pytest.raises(ArgumentError, match="inputs must be one of 'asym', 'symfp', 'symqt', got 'sym'"):
        qtk.apply_gptq(sim, data, inputs="sym", progress=False)
    with pytest.raises(ArgumentError, match="offload must be one of"):
        qtk.apply_gptq(sim, data, offload="gpu", progress=False)
    with pytest.raises(TypeError, match="num_batch"):
        qtk.apply_gptq(sim, data, num_batch=3, progress=False)
    assert all(torch.equal(before[name], value) for name, value in sim.model.state_dict().items())


def test_what_a_method_cannot_improve_is_named_beforehand():
    rules = [{"match": {"path": "fc1"}, "weight": {"dtype": "fp8_e4m3"}}]
    _, sim, data = problem(config={"version": 1, "extends": "default", "rules": rules})
    report = qtk.apply_adaround(sim, data, iterations=5, progress=False)
    assert "fp8_e4m3" in report.skipped["fc1.weight"]
    assert [layer.name for layer in report.layers] == ["conv.weight", "fc2.weight"]
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2)).eval()
    data = [torch.randn(8, 4)]
    sim = qtk.QuantSim(model, data[0], weight_bits=4)
    sim.compute_encodings(data, progress=False)
    report = qtk.correct_bias(sim, data, progress=False)
    assert report.skipped == {"0.weight": "it has no bias to correct"}
    assert not any(quantizer.frozen for quantizer in sim.quantizers.values())
    sim.quantizers["1.weight"].learn_range()
    with pytest.raises(CalibrationError, match="its range is being learned"):
        qtk.apply_gptq(sim, data, sites="1.weight", progress=False)


def test_the_report_of_bias_correction_is_true():
    model, sim, data = problem(weight_bits=2, activation_bits=None)
    before = problem(weight_bits=2, activation_bits=None)[1]
    report = qtk.correct_bias(sim, data, sites="fc2.weight", progress=False)
    last = report.layers[-1]
    assert last.noise == pytest.approx(lost(model, sim, data), rel=1e-4)
    assert last.noise + last.before - last.after == pytest.approx(lost(model, before, data), rel=1e-3)
    assert last.sqnr_db > last.sqnr_before_db


def test_few_data_are_warned_of():
    _, sim, data = problem()
    with pytest.warns(UserWarning, match="3 layers saw fewer rows"):
        qtk.apply_gptq(sim, [data[0][:2]], progress=False)


def test_every_call_has_the_same_options():
    calls = [qtk.apply_layerwise, qtk.apply_seq_mse, qtk.apply_gptq, qtk.apply_adaround, qtk.correct_bias]
    options = [
        {name: (each.default, each.annotation) for name, each in inspect.signature(call).parameters.items()}
        for call in calls
    ]
    common = list(options[0])[3:]
    assert common[-4:] == ["holdout", "groups", "start", "keep_originals"]
    for own in options:
        assert list(own)[-len(common):] == common
        assert all(own[name] == options[0][name] for name in common)


@pytest.mark.parametrize("method", METHODS)
def test_options_reach_the_run(method, monkeypatch):
    seen = []
    monkeypatch.setattr("qtk.workflow.layerwise_methods.apply_layerwise", lambda *args, **given: seen.append(given))
    given = {"inputs": "symqt", "sites": "*", "forward": print, "num_batches": 3, "offload": "cpu",
             "checkpoint_dir": "run", "progress": False, "valid": "mask", "holdout": 0.5, "groups": [1, 2],
             "start": "present", "keep_originals": False}
    METHODS[method](None, [], **given)
    assert seen == [given]
    assert given.keys() == set(list(inspect.signature(qtk.apply_layerwise).parameters)[3:])


@pytest.mark.parametrize("method", [name for name in METHODS if name != "bias_correction"])
def test_every_method_holds_out_groups(method):
    """What is held out is not seen: with one group of two held out, the result is that of the other group alone."""
    _, sim, data = problem()
    _, other, _ = problem()
    report = METHODS[method](sim, data, groups=["a", "a", "b", "b"], holdout=0.5, progress=False)
    changed = [data[0], data[1], *(x * 1.0001 for x in data[2:])]
    METHODS[method](other, changed, groups=["a", "a", "b", "b"], holdout=0.5, progress=False)
    (own, _), (expected, _) = state(sim), state(other)
    first = [name for name in own if name.startswith("conv.")]
    assert first
    assert all(torch.equal(own[name], expected[name]) for name in first)
    assert all(layer.held_out is not None for layer in report.layers)
    with pytest.raises(CalibrationError, match="groups needs a label for each of the 4 calls"):
        METHODS[method](problem()[1], data, groups=["a", "b"], progress=False)


def test_groups_without_a_judge_are_warned_of():
    _, sim, data = problem()
    with pytest.warns(UserWarning, match="groups: the results of BiasCorrection are not judged"):
        qtk.correct_bias(sim, data, groups=["a", "a", "b", "b"], progress=False)


def test_a_loader_of_pairs_without_forward_is_told_what_to_pass():
    _, sim, data = problem()
    with pytest.raises(CalibrationError, match=r"does not run as model\(\*batch\).*pass forward=lambda model, batch"):
        qtk.apply_gptq(sim, [[x, torch.zeros(32)] for x in data], progress=False)


def test_odd_ways_of_asking():
    _, sim, data = problem()
    qtk.apply_layerwise(sim, data, "seq_mse", progress=False)
    with pytest.raises(CalibrationError, match="improve a QuantSim, got Net"):
        qtk.apply_gptq(Net(), data)
    with pytest.raises(CalibrationError, match="no layer was improved: no data reached it"):
        qtk.apply_gptq(sim, [data[0][:0]], progress=False)
    _, sim, data = problem()
    with torch.inference_mode():
        qtk.apply_adaround(sim, data, iterations=20, through_activation=True, progress=False)
    assert not sim.model.get_parameter("fc1.weight").is_inference()


def state(sim):
    flags = {name: (quantizer.frozen, quantizer.rewrote_weight) for name, quantizer in sim.quantizers.items()}
    return {name: value.clone() for name, value in sim.model.state_dict().items()}, flags


def same(before, after):
    return before[1] == after[1] and before[0].keys() == after[0].keys() and all(
        torch.equal(value, after[0][name]) for name, value in before[0].items())


@pytest.mark.parametrize("method", [qtk.apply_seq_mse, qtk.apply_gptq, qtk.correct_bias])
@pytest.mark.parametrize("calibrated", [True, False])
@pytest.mark.parametrize(("change", "words"), [
    (lambda x: x.double(), r"batch 0 \(float64 \[32, .*does not run"),
    (lambda x: x.half(), r"batch 0 \(float16"),
    (lambda x: (x * 50).to(torch.uint8), "batch 0: input x is uint8, the model was captured for float32"),
])
def test_a_run_that_fails_leaves_everything_as_it_was(method, calibrated, change, words):
    _, sim, data = problem()
    if not calibrated:
        for quantizer in sim.quantizers.values():
            if quantizer.scale is not None:
                quantizer.drop_encoding()
    before = state(sim)
    with pytest.raises((CalibrationError, CaptureError), match=words):
        method(sim, [change(x) for x in data], progress=False)
    assert same(before, state(sim))


def test_a_layer_that_fails_undoes_those_before(monkeypatch):
    _, sim, data = problem()
    before, real, calls = state(sim), run.compute_update, []

    def compute_update(layer, *rest):
        calls.append(layer.name)
        if layer.name == "fc2.weight":
            raise CalibrationError("fc2.weight: no inverse")
        return real(layer, *rest)

    monkeypatch.setattr(run, "compute_update", compute_update)
    with pytest.raises(CalibrationError, match="no inverse"):
        qtk.apply_layerwise(sim, data, ["seq_mse", "gptq", "bias_correction"], progress=False)
    assert len(calls) == 3
    assert same(before, state(sim))


def test_an_interrupt_keeps_finished_layers_in_the_checkpoint_alone(monkeypatch, tmp_path):
    _, sim, data = problem()
    before, real, calls = state(sim), run.compute_update, []

    def compute_update(layer, *rest):
        calls.append(layer.name)
        if layer.name == "fc1.weight":
            signal.raise_signal(signal.SIGINT)
        return real(layer, *rest)

    monkeypatch.setattr(run, "compute_update", compute_update)
    with pytest.raises(KeyboardInterrupt):
        qtk.apply_gptq(sim, data, checkpoint_dir=tmp_path, progress=False)
    assert calls == ["conv.weight", "fc1.weight"]
    assert same(before, state(sim))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0000.safetensors", "run.json"]
    monkeypatch.setattr(run, "compute_update", lambda layer, *rest: calls.append(layer.name) or real(layer, *rest))
    qtk.apply_gptq(sim, data, checkpoint_dir=tmp_path, progress=False)
    assert calls[2:] == ["fc1.weight", "fc2.weight"]
    uninterrupted = problem()[1]
    qtk.apply_gptq(uninterrupted, data, progress=False)
    assert same(state(uninterrupted), state(sim))


@pytest.mark.filterwarnings("ignore:.*saw fewer rows")
@pytest.mark.parametrize("name", slow_but(
    ZOO, "residual", "all_transposed", "fused_attention", "gru", "recurrent_cells", "reused_block", "tied", "splits",
    "creations", "norms",
))
def test_every_kind_of_model(name):
    data = [ZOO[name].inputs(), ZOO[name].inputs()]
    sim = qtk.QuantSim(pair(name)[1], data[0], weight_bits=4)
    steps = ["seq_mse", "gptq", "bias_correction"]
    if not weighted_layers(sim.model, sim.plan)[0]:
        with pytest.raises(CalibrationError, match="no layer to work on"):
            qtk.apply_layerwise(sim, data, steps, progress=False)
        return
    report = qtk.apply_layerwise(sim, data, steps, progress=False)
    assert all(layer.reason is None for layer in report.layers), str(report)
    sim.compute_encodings(data, progress=False)
    sim.check()
