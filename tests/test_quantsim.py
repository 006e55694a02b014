"""The handle a user holds, end to end on models small enough to check by hand."""

import copy
import dataclasses
import inspect
from collections import OrderedDict

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qtk
from qtk.calibration.calibrate import CalibrationData
from qtk.errors import CalibrationError, CaptureError, CheckError, ConfigError, EncodingError, NotCalibratedError
from qtk.quantizers.modes import in_mode
from qtk.report.account import Account
from qtk.report.data_report import CalibrationSize, DataReport
from qtk.workflow.export import OnnxOptions


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        return self.head(F.relu(self.bn(self.conv(x))).mean((2, 3)))


LIVE = {"version": 1, "extends": "default", "fold_batch_norms": False}


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture
def batches():
    torch.manual_seed(1)
    return [torch.randn(4, 3, 8, 8) for _ in range(3)]


@pytest.fixture
def sim(net, batches):
    sim = qtk.QuantSim(net, batches[0], config=LIVE)
    sim.compute_encodings(batches, progress=False)
    return sim


@pytest.mark.medium
def test_weight_encodings_are_the_extremes_of_each_channel(net, sim):
    encoding = sim.encodings()["conv.weight"]
    flat = net.conv.weight.detach().double().flatten(1)
    expected = torch.maximum(flat.amax(1) / 127, flat.amin(1) / -128).float()
    assert torch.equal(encoding.scale, expected)
    assert encoding.zero_point is None


def test_activation_encodings_cover_what_all_batches_showed(net, sim, batches):
    with torch.no_grad():
        hidden = [F.relu(net.bn(net.conv(batch))) for batch in batches]
    encoding = sim.encodings()["relu:out"]
    assert float(encoding.minimum) == 0.0
    largest = max(float(value.max()) for value in hidden)
    assert float(encoding.maximum) == pytest.approx(largest, rel=1e-6)


def test_the_simulation_is_the_float_model_on_rounded_values(net, sim, batches):
    """An independent simulation: plain torch with torch's own fake-quantize at every site."""
    e = sim.encodings()

    def activation(x, name):
        scale, zero = float(e[name].scale), int(e[name].zero_point)
        return torch.fake_quantize_per_tensor_affine(x, scale, zero, 0, 255)

    def weight(w, name):
        zeros = torch.zeros(w.shape[0], dtype=torch.int32)
        return torch.fake_quantize_per_channel_affine(w, e[name].scale, zeros, 0, -128, 127)

    with torch.no_grad():
        x = activation(batches[0], "x:input")
        x = F.conv2d(x, weight(net.conv.weight, "conv.weight"), net.conv.bias)
        x = activation(F.relu(net.bn(x)), "relu:out").mean((2, 3))
        x = F.linear(activation(x, "mean:out"), weight(net.head.weight, "head.weight"), net.head.bias)
        expected = activation(x, "head:out")
        found = sim.model(batches[0])
    # torch multiplies by 1/scale where we divide: a tie may fall to the other side, by one step of the last site
    assert float((found - expected).abs().max()) <= 1.01 * float(e["head:out"].scale)
    assert float((found - expected).abs().mean()) < 0.05 * float(e["head:out"].scale)


def test_bypassed_it_is_the_float_model_bit_for_bit(net, sim, batches):
    with in_mode(sim.quantizers.values(), qtk.Mode.BYPASS), torch.no_grad():
        assert torch.equal(sim.model(batches[0]), net(batches[0]))


@pytest.mark.medium
def test_the_caller_keeps_a_float_model(net, sim):
    assert not any("qtk_quantizers" in name for name, _ in net.named_modules())
    assert sim.model.conv.weight is not net.conv.weight
    assert torch.equal(sim.model.conv.weight, net.conv.weight)


@pytest.mark.medium
def test_in_place_shares_the_parameters(net, batches):
    sim = qtk.QuantSim(net, batches[0], config=LIVE, in_place=True)
    assert sim.model.conv.weight is net.conv.weight


def test_a_prepared_model_is_taken_as_it_is(net, batches):
    prepared = qtk.prepare_model(net, batches[0])
    code = prepared.code
    sim = qtk.QuantSim(prepared, batches[0])
    sim.compute_encodings(batches, progress=False)
    assert prepared.code == code


def test_a_model_traced_without_inputs_is_finished_by_the_sim(net, batches):
    prepared = qtk.prepare_model(net)
    assert not prepared.report.complete
    sim = qtk.QuantSim(prepared, batches[0])
    sim.compute_encodings(batches, progress=False)
    assert "conv.weight" in sim.encodings()


def test_simulating_before_calibrating_is_an_error(net, batches):
    sim = qtk.QuantSim(net, batches[0])
    with pytest.raises(NotCalibratedError, match=r"has no encoding.*compute_encodings"):
        sim.model(batches[0])
    with pytest.raises(CheckError, match=r"conv\.weight: no encoding"):
        sim.check()


@pytest.mark.parametrize("model", [lambda x: x, Net])
def test_only_modules_are_simulated(model, batches):
    with pytest.raises(CaptureError, match=r"model must be a torch\.nn\.Module"):
        qtk.QuantSim(model, batches[0])


def test_example_inputs_are_needed(net):
    with pytest.raises(CaptureError, match="example_inputs must be a tensor, a tuple or a dict, got NoneType"):
        qtk.QuantSim(net, None)


@pytest.mark.medium
def test_comparing_without_data_is_an_error(sim):
    with pytest.raises(CalibrationError, match="no batches"):
        sim.compare([], progress=False)


@pytest.mark.medium
def test_calibrating_in_train_mode_observes_eval_mode_and_changes_no_statistics(net, batches):
    net.train()
    training = qtk.QuantSim(net, batches[0], config=LIVE)
    training.compute_encodings(batches, progress=False)
    assert training.model.training
    assert torch.equal(training.model.bn.running_mean, torch.zeros(6))
    evaluating = qtk.QuantSim(net.eval(), batches[0], config=LIVE)
    evaluating.compute_encodings(batches, progress=False)
    expected = evaluating.encodings()
    assert all(encoding.equals(expected[site]) for site, encoding in training.encodings().items())


def test_an_unknown_scheme_names_the_nearest(net, batches):
    with pytest.raises(ConfigError, match="did you mean 'min_max'"):
        qtk.QuantSim(net, batches[0], scheme="minmax")


def test_a_model_that_does_not_run_says_so(net):
    with pytest.raises(CaptureError, match="does not run on its example inputs"):
        qtk.QuantSim(net, torch.randn(2, 5, 8, 8))


@pytest.mark.medium
@pytest.mark.parametrize(("value", "word"), [(float("nan"), "NaN"), (float("inf"), r"\+inf")])
def test_broken_data_names_site_and_batch_and_changes_nothing(sim, batches, value, word):
    before = {name: encoding.scale for name, encoding in sim.encodings().items()}
    broken = batches[1].clone()
    broken[0, 0, 0, 0] = value
    with pytest.raises(CalibrationError, match=rf"batch 1: x:input: .*{word}"):
        sim.compute_encodings([batches[0] * 2, broken], progress=False)
    after = {name: encoding.scale for name, encoding in sim.encodings().items()}
    assert all(torch.equal(before[name], after[name]) for name in before)
    sim.check()


def test_no_data_is_an_error(net, batches):
    sim = qtk.QuantSim(net, batches[0])
    with pytest.raises(CalibrationError, match="no batches"):
        sim.compute_encodings([], progress=False)
    with pytest.raises(CalibrationError, match="need calibration data"):
        sim.compute_encodings(None)


def test_weights_need_no_data(net, batches):
    sim = qtk.QuantSim(net, batches[0], activation_bits=None, weight_bits=4)
    sim.compute_encodings(None)
    assert set(sim.encodings()) == {"conv.weight", "head.weight"}


def test_a_frozen_quantizer_keeps_its_encoding(sim, batches):
    before = sim.encodings()["relu:out"]
    sim.quantizers["relu:out"].frozen = True
    sim.compute_encodings([batch * 10 for batch in batches], progress=False)
    assert sim.encodings()["relu:out"].equals(before)
    assert not sim.encodings()["x:input"].equals(before)


def test_a_rule_that_matches_nothing_is_an_error_at_construction(net, batches):
    config = {"version": 1, "rules": [{"match": {"path": "haed"}, "weight": {"bits": 8}}]}
    with pytest.raises(ConfigError, match="no op has the path haed; did you mean 'head'"):
        qtk.QuantSim(net, batches[0], config=config)


@pytest.mark.medium
def test_switched_off_quantizers_fail_the_check(sim):
    sim.quantizers["relu:out"].mode = qtk.Mode.BYPASS
    with pytest.raises(CheckError, match="relu:out: mode is BYPASS"):
        sim.check()


class MaskedAttention(nn.Module):
    def __init__(self, fill):
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.fill = fill

    def forward(self, x, mask):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.transpose(1, 2) + torch.where(mask, 0.0, self.fill)
        return scores.softmax(-1) @ v


@pytest.mark.medium
@pytest.mark.parametrize("fill", [float("-inf"), torch.finfo(torch.float32).min, -1e32])
def test_masks_never_enter_a_range_and_stay_masks(fill):
    torch.manual_seed(0)
    model = MaskedAttention(fill).eval()
    x, mask = torch.randn(2, 5, 8), torch.ones(2, 5, 5).tril().bool()
    sim = qtk.QuantSim(model, (x, mask), config={"version": 1})  # no supergroup hides the sum
    sim.compute_encodings([(x, mask)], progress=False)
    assert all(bool(encoding.scale.isfinite().all()) for encoding in sim.encodings().values())
    assert max(float(encoding.maximum.max()) for encoding in sim.encodings().values()) < 100
    reasons = {site.name: why for site, why in sim.plan.unquantized.items()}
    masked = [why for why in reasons.values() if "carries a mask" in why]
    assert masked
    assert all("20 of 50 values" in why for why in masked)
    with torch.no_grad():
        error = sim.model(x, mask) - model(x, mask)
        assert float(error.abs().max()) < 0.1
        # a masked token has no influence at all, as in the float model
        moved = x.clone()
        moved[:, -1] += 100
        assert torch.equal(sim.model(moved, mask)[:, :-1], sim.model(x, mask)[:, :-1])


@pytest.mark.medium
def test_compare_ranks_a_planted_bad_scale_first(sim, batches):
    healthy = sim.compare(batches, progress=False)
    assert {error.site for error in healthy} == set(sim.quantizers)
    assert [error.own_sqnr_db for error in healthy] == sorted(error.own_sqnr_db for error in healthy)
    bad = sim.encodings()["head.weight"]
    sim.quantizers["head.weight"].load_encoding(qtk.Encoding(bad.spec, bad.scale * 20))
    assert sim.compare(batches, progress=False)[0].site == "head.weight"
    assert "head.weight" not in [error.site for error in healthy[:2]]


@pytest.mark.medium
def test_save_and_load_compute_the_same_bits(net, sim, batches, tmp_path):
    with torch.no_grad():
        sim.model.conv.weight.mul_(1.5)
        expected = sim.model(batches[0])
    sim.save(tmp_path / "sim")
    loaded = qtk.QuantSim.load(tmp_path / "sim", copy.deepcopy(net), batches[0])
    loaded.check()
    with torch.no_grad():
        assert torch.equal(loaded.model(batches[0]), expected)
    assert loaded.plan == sim.plan


@pytest.mark.medium
def test_a_width_left_out_is_left_out_again_after_loading(net, batches, tmp_path):
    config = {"version": 1, "defaults": {"weight": {"bits": 4}}}
    qtk.QuantSim(net, batches[0], config=config, activation_bits=6).save(tmp_path / "sim")
    loaded = qtk.QuantSim.load(tmp_path / "sim", net, batches[0])
    assert (loaded.weight_bits, loaded.activation_bits) == (qtk.FROM_CONFIG, 6)
    assert loaded.quantizers["head.weight"].spec.dtype.bits == 4


@pytest.mark.medium
def test_loading_into_another_model_names_what_differs(sim, batches, tmp_path):
    class Other(Net):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(6, 5)

    sim.save(tmp_path / "sim")
    with pytest.raises(EncodingError, match=r"head\.weight"):
        qtk.QuantSim.load(tmp_path / "sim", Other().eval(), batches[0])


def test_it_trains_in_a_plain_loop(sim, batches):
    sim.model.train()
    optimizer = torch.optim.SGD(sim.model.parameters(), lr=0.1)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = F.mse_loss(sim.model(batches[0]), torch.zeros(4, 4))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.medium
def test_learned_ranges_are_trained_and_exported_as_codes(sim, batches):
    quantizer = sim.quantizers["relu:out"]
    before = sim.encodings()["relu:out"]
    assert sim.learn_ranges("relu:out") == ["relu:out"]
    assert any(parameter is quantizer.scale_factor for parameter in sim.model.parameters())
    sim.model(batches[0]).sum().backward()
    assert float(quantizer.scale_factor.grad.abs()) > 0
    with torch.no_grad():
        quantizer.scale_factor.fill_(1.25)
    quantizer.fix_range()
    assert torch.equal(sim.encodings()["relu:out"].scale, before.scale * 1.25)


def test_a_changed_weight_is_quantized_anew_in_eval(sim, batches):
    with torch.no_grad():
        first = sim.model(batches[0])
        sim.model.head.weight.zero_()
        second = sim.model(batches[0])
    assert not torch.equal(first, second)


@pytest.mark.medium
def test_numbers_of_numpy_are_numbers(tmp_path):
    sim = qtk.QuantSim(nn.Linear(4, 2), torch.randn(3, 4), weight_bits=np.int64(4))
    assert str(sim.quantizers["weight"].spec.dtype) == "int4"
    sim.compute_encodings([torch.randn(3, 4)], num_batches=np.int32(1), progress=False)
    sim.save(tmp_path / "sim")
    assert qtk.QuantSim.load(tmp_path / "sim", nn.Linear(4, 2), torch.randn(3, 4)).weight_bits == 4


class Tokens(nn.Module):
    """A model of sequences, as in transformers: a config, optional labels, a dict with or without a loss."""

    def __init__(self):
        super().__init__()
        self.config = {"vocab_size": 11}
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 3)

    def forward(self, input_ids, attention_mask=None, labels=None):
        x = self.embedding(input_ids)
        if attention_mask is not None:
            x = x * attention_mask[..., None]
        logits = self.head(x)
        if labels is None:
            return OrderedDict(logits=logits)
        return OrderedDict(loss=nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits=logits)


def tokens(length, **more):
    return {"input_ids": torch.randint(0, 11, (2, length)), "attention_mask": torch.ones(2, length), **more}


@pytest.mark.medium
def test_sequences_of_any_length(tmp_path):
    model = Tokens().eval()
    sim = qtk.QuantSim(model, tokens(5), dynamic_shapes="all")
    sim.compute_encodings([tokens(5), tokens(9)], progress=False)
    batch = tokens(7)
    assert sim.model(**batch)["logits"].shape == (2, 7, 3)
    assert sim.model.config["vocab_size"] == 11
    with pytest.raises(ConfigError, match="dynamic_shapes"):
        sim.dynamic_shapes = "batch"
    sim.save(tmp_path / "sim")
    for source in (model, qtk.prepare_model(model, tokens(5), dynamic_shapes="all")):
        again = qtk.QuantSim.load(tmp_path / "sim", source, tokens(5))
        assert torch.equal(again.model(**batch)["logits"], sim.model(**batch)["logits"])
        assert again.dynamic_shapes == "all"
        again.save(tmp_path / "again", force=True)
    with pytest.raises(CaptureError, match="prepared already; give dynamic_shapes when preparing it"):
        qtk.QuantSim(qtk.prepare_model(model, tokens(5)), tokens(5), dynamic_shapes="all")


def test_another_length_names_the_argument():
    sim = qtk.QuantSim(Tokens(), tokens(5))
    with pytest.raises(CaptureError, match=r'captured for \(any, 5\); .* with dynamic_shapes="all"'):
        sim.model(**tokens(7))


@pytest.mark.medium
def test_labels_at_capture_alone_or_at_the_call_alone_are_named():
    labels = torch.zeros(2, 5, dtype=torch.int64)
    with pytest.raises(CaptureError, match="input labels is None, the model was captured with a tensor"):
        qtk.QuantSim(Tokens(), tokens(5, labels=labels)).model(**tokens(5))
    with pytest.raises(CaptureError, match="input labels was not given when the model was captured"):
        qtk.QuantSim(Tokens(), tokens(5)).model(**tokens(5, labels=labels))


def test_reset_is_short_for_sequences():
    class Sum(nn.Module):
        def forward(self, x, total):
            return x.relu(), total + x

    batches = [(torch.ones(2, 1), torch.zeros(2, 1)) for _ in range(6)]
    sim = qtk.QuantSim(Sum(), batches[0], states={"total": 1})
    largest = []
    for data, options in ((batches, {"reset": 3}), (qtk.Sequences(batches, reset=3), {}), (batches, {})):
        sim.compute_encodings(data, progress=False, **options)
        largest.append(round(float(sim.encodings()["total:input"].maximum), 3))
    assert largest == [3.0, 3.0, 6.0]


def test_it_is_one_class_whose_methods_are_its_own():
    assert [each.__name__ for each in qtk.QuantSim.__mro__] == ["QuantSim", "RejectsUnknownAttributes", "object"]
    assert {name for name in dir(qtk.QuantSim) if not name.startswith("_")} == {
        "check", "compare", "compute_encodings", "data_report", "drift", "encodings", "export", "fix_ranges", "forget",
        "freeze", "from_checkpoint", "learn_ranges", "load", "load_encodings", "load_float_state_dict", "model", "plan",
        "plan_of", "quantizers", "range_parameters", "report", "save", "sensitivity", "set_range", "simulation",
        "to_original", "track_weights", "unfreeze", "verify_export", "weight_parameters",
    }


VERBS = {
    "compute_encodings": ("workflow.compute_encodings.compute_encodings", ([],), {
        "sites": "a", "only_missing": True, "forward": print, "num_batches": 7, "progress": False, "valid": "mask"}),
    "check": ("workflow.check.check", (), {}),
    "set_range": ("workflow.ranges.set_range", ("a", 0.0, 1.0), {}),
    "freeze": ("workflow.ranges.freeze", ("a",), {}),
    "unfreeze": ("workflow.ranges.freeze", ("a",), {}),
    "forget": ("workflow.ranges.forget", ("a",), {}),
    "load_encodings": ("workflow.load_encodings.load_encodings", ({},), {
        "strict": False, "partial": True, "freeze": False}),
    "learn_ranges": ("training.learned_ranges.learn_ranges", ("a",), {"gradient_scale": None}),
    "fix_ranges": ("training.learned_ranges.fix_ranges", ("a",), {}),
    "range_parameters": ("training.learned_ranges.range_parameters", (), {}),
    "weight_parameters": ("training.learned_ranges.weight_parameters", (), {}),
    "track_weights": ("training.learned_ranges.track_weights", ("a",), {}),
    "compare": ("analysis.compare.compare", ([],), {
        "forward": print, "num_batches": 7, "progress": False, "valid": "mask"}),
    "sensitivity": ("analysis.sensitivity.sensitivity", ([],), {
        "loss": print, "top": 4, "groups": "g", "forward": print, "num_batches": 7, "progress": False,
        "valid": "mask"}),
    "drift": ("analysis.drift.drift", ([],), {"steps": 9, "forward": print, "progress": False}),
    "report": ("workflow.report.report", ("page", []), {
        "title": "t", "forward": print, "num_batches": 7, "sensitivity": False, "account": Account("top-1", 0.1),
        "headline": {"a": "b"}, "force": True, "progress": False, "valid": "mask", "data_name": "some",
        "data_report": DataReport((CalibrationSize(1, 64, 0.8, 30.0, 0.25),), 1)}),
    "export": ("workflow.export.export", ("folder",), {
        "formats": "onnx", "force": True, "opset": 23, "check": False, "output_names": ["y"], "state_codes": True,
        "tokenizer": print, "io_codes": True, "progress": False}),
    "verify_export": ("workflow.verify_export.verify_export", ("folder", []), {
        "forward": print, "runtime": "openvino", "float_export": "float", "turns": 3, "progress": False,
        "valid": "mask", "batch_size": 5, "threads": 6}),
    "to_original": ("workflow.original_class.to_original", (), {}),
    "load_float_state_dict": ("transforms.float_state.load_float_state", ({},), {}),
    "save": ("workflow.store.save", ("folder",), {"weights": "integer", "force": True}),
}
"""Method → the function it calls, and arguments none of which is the default."""


@pytest.mark.parametrize("name", VERBS)
def test_a_method_hands_every_argument_to_its_function_and_returns_what_that_returns(name, linear, monkeypatch):
    path, args, given = VERBS[name]
    seen, result = [], object()

    def verb(*args, **kwargs):
        for each in (*args, *kwargs.values()):
            seen.extend([getattr(each, field.name) for field in dataclasses.fields(each)]
                        if isinstance(each, (CalibrationData, OnnxOptions)) else [each])
        return result

    monkeypatch.setattr(f"qtk.{path}", verb)
    method = getattr(linear, name)
    assert list(inspect.signature(method).parameters)[len(args):] in ([*given], [*given, "reset"])
    returned = method(*args, **given)
    assert returned is (result if inspect.signature(method).return_annotation != "None" else None)
    assert seen[0] is linear or seen[0] is linear.simulation or name == "save"
    assert all(any(value is each for each in seen) for value in [*args, *given.values()])


@pytest.fixture(scope="module")
def linear():
    return qtk.QuantSim(nn.Linear(3, 2).eval(), torch.randn(4, 3))
