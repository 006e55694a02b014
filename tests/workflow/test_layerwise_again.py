"""A second layer-wise call on the same simulation: it starts from the float weights, unless asked to go on."""

import copy
import gc
import os
import pickle
import warnings

import pytest
import torch
from torch import nn

import qtk

RULES = [{"match": {"path": "*"}, "weight": {"scheme": "min_max"}}]
SPEC = {"weight_bits": 3, "activation_bits": 8, "config": {"version": 1, "extends": "default", "rules": RULES}}


def problem(build=None, **settings):
    torch.manual_seed(0)
    model = (build or mlp)().eval()
    data = [torch.randn(64, 12) + 0.3 for _ in range(4)]
    sim = qtk.QuantSim(model, data[0], **{**SPEC, **settings})
    sim.compute_encodings(data, progress=False)
    return model, sim, data


def mlp():
    return nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 5))


class Steps(nn.Module):
    """Three steps of a cell between two linear layers, run as a whole by the walk."""

    def __init__(self):
        super().__init__()
        self.first, self.lstm, self.last = nn.Linear(12, 12), nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 5)

    def forward(self, x):
        return self.last(self.lstm(self.first(x).unflatten(1, (3, 4)))[0][:, -1])


class Twice(nn.Module):
    """A layer that is used two times."""

    def __init__(self):
        super().__init__()
        self.fc, self.head = nn.Linear(12, 12), nn.Linear(12, 5)

    def forward(self, x):
        return self.head(self.fc(torch.relu(self.fc(x))))


class Python(nn.Module):
    """A model that stays Python: its layers are islands."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(12, 12), nn.Linear(12, 5)

    def forward(self, x):
        y = self.a(x)
        return self.b(y if float(y.detach().sum()) > 1e9 else y * 2)


MODELS = {"mlp": mlp, "lstm": Steps, "shared": Twice, "islands": Python}


def state(sim):
    flags = {name: (quantizer.frozen, quantizer.rewrote_weight, quantizer.mode)
             for name, quantizer in sim.quantizers.items()}
    return {name: value.clone() for name, value in sim.model.state_dict().items()}, flags


def assert_same(sim, other):
    (own, flags), (expected, expected_flags) = state(sim), state(other)
    assert own.keys() == expected.keys()
    assert [name for name in own if not torch.equal(own[name], expected[name])] == []
    assert flags == expected_flags


def run(sim, data, methods, sites=None, **options):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*saw fewer rows")
        warnings.filterwarnings("error", message=".*(start again|an earlier call)")
        options = qtk.LayerwiseOptions(**options)
        return qtk.apply_layerwise(sim, data, methods, sites=sites, progress=False, options=options)


@pytest.mark.sample(2)
@pytest.mark.medium
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("first", "second"), [
    (["seq_mse", "gptq", "bias_correction"], ["gptq"]), (["adaround"], ["seq_mse", "gptq"]),
    *(pytest.param([first], [second], marks=pytest.mark.slow) for first, second in (
        ("gptq", "seq_mse"), ("bias_correction", "gptq"), ("gptq", "gptq"),
        ("coordinate_descent", "coordinate_descent"),
    )),
])
def test_a_second_call_gives_what_it_gives_on_a_fresh_simulation(name, first, second):
    build = MODELS[name]
    _, sim, data = problem(build)
    _, fresh, _ = problem(build)
    run(sim, data, first)
    report = run(sim, data, second, start="float")
    expected = run(fresh, data, second)
    assert_same(sim, fresh)
    assert report.layers == expected.layers
    assert report.restarted
    assert not expected.restarted
    assert f"{len(report.restarted)} layers started from their float weights" in str(report)
    if second == ["seq_mse"]:  # which freezes encodings and rounds nothing
        return
    third = run(sim, data, ["seq_mse"], start="float")
    _, fresh, _ = problem(build)
    assert run(fresh, data, ["seq_mse"]).layers == third.layers
    assert_same(sim, fresh)


@pytest.mark.medium
def test_it_says_so_unless_it_was_asked():
    _, sim, data = problem()
    qtk.apply_gptq(sim, data, progress=False)
    with pytest.warns(UserWarning, match=r"layers \(.*\.weight\) start again from their float weights"):
        qtk.apply_seq_mse(sim, data, progress=False)
    run(sim, data, "gptq")  # the scales of Sequential MSE stay, as they did, and no weight was rounded
    _, fresh, _ = problem()
    run(fresh, data, "seq_mse")
    run(fresh, data, "gptq")
    assert_same(sim, fresh)


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("name", MODELS)
def test_layers_that_a_later_call_leaves_are_float_in_its_float_model(name):
    """As if both calls had been one walk: the later layers are what a single walk makes of them."""
    _, sim, data = problem(MODELS[name], activation_bits=None)
    _, fresh, _ = problem(MODELS[name], activation_bits=None)
    names = [layer.name for layer in run(fresh, data, ["gptq"], holdout=0.0).layers]
    run(sim, data, ["gptq"], sites=names[:-1], holdout=0.0)
    report = run(sim, data, ["gptq"], sites=names[-1:], holdout=0.0)
    assert [layer.name for layer in report.layers] == names[-1:]
    assert_same(sim, fresh)
    run(sim, data, ["seq_mse"], sites=names[:1], start="float")  # those behind are put back as they were
    _, other, _ = problem(MODELS[name], activation_bits=None)
    run(other, data, ["seq_mse"], sites=names[:1])
    assert all(torch.equal(sim.encodings()[names[0]].scale, each.encodings()[names[0]].scale) for each in (sim, other))
    last = names[-1]
    assert torch.equal(sim.model.get_parameter(last), fresh.model.get_parameter(last))


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("call", [
    qtk.correct_bias, lambda *args, **options: qtk.apply_layerwise(*args, "bias_correction", **options),
])
def test_bias_correction_goes_on_from_rounded_weights(call):
    """The last layer's outputs get the means that they have in the float model, also when corrected again."""
    model, sim, data = problem(activation_bits=None)
    run(sim, data, "gptq")
    weights = {name: value.clone() for name, value in sim.model.named_parameters() if name.endswith("weight")}
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            report = call(sim, data, progress=False)
        assert all(torch.equal(value, sim.model.get_parameter(name)) for name, value in weights.items())
        x = torch.cat(data)
        with torch.no_grad():
            error = (sim.model(x) - model(x)).mean(0)
        assert float(error.abs().max()) < 1e-5
    assert report.layers[-1].after == pytest.approx(report.layers[-1].before, rel=1e-3)


@pytest.mark.medium
def test_coordinate_descent_goes_on_from_gptq_and_never_raises_its_error():
    _, sim, data = problem(activation_bits=None)
    run(sim, data, "gptq", holdout=0.0)
    report = run(sim, data, "coordinate_descent", start="present", holdout=0.0)
    chain = problem(activation_bits=None)[1]
    expected = run(chain, data, ["gptq", "coordinate_descent"], holdout=0.0)
    assert all(layer.after <= layer.before * (1 + 1e-6) for layer in report.layers)
    first, first_of_chain = report.layers[0], expected.layers[0]  # the layers behind had other inputs to be rounded by
    assert first.after == pytest.approx(first_of_chain.after, rel=1e-5)
    assert first.before < first_of_chain.before
    run(sim, data, "seq_mse", start="float")
    fresh = problem(activation_bits=None)[1]
    run(fresh, data, "seq_mse")
    assert_same(sim, fresh)


def gone(sim, data, methods="seq_mse", **options):
    with pytest.warns(UserWarning, match=r"an earlier call rewrote the weights of \d layers.*count as the float model"):
        return qtk.apply_layerwise(sim, data, methods, progress=False, options=qtk.LayerwiseOptions(**options))


@pytest.mark.sample(2)
@pytest.mark.medium
@pytest.mark.parametrize("change", ["trained weight", "trained bias", "not kept", "range learned"])
def test_changed_layers_and_those_not_kept_count_as_they_are(change):
    _, sim, data = problem()
    run(sim, data, "gptq", keep_originals=change != "not kept", sites=["0.weight", "2.weight"], holdout=0.0)
    rounded = sim.model.get_parameter("0.weight").clone()
    assert all((sim.quantizers[name].original is None) == (change == "not kept") for name in ("0.weight", "2.weight"))
    if change == "range learned":
        sim.unfreeze("0.weight")
        sim.learn_ranges("0.weight")
    elif change != "not kept":
        with torch.no_grad():
            sim.model.get_parameter(f"0.{change.split()[1]}")[1] += 0.01
    before = sim.model.get_parameter("0.weight").clone()
    report = gone(sim, data, "gptq", start="float", holdout=0.0)
    assert report.restarted == (() if change == "not kept" else ("2.weight",))
    if change == "trained weight":
        assert not torch.equal(sim.model.get_parameter("0.weight"), before)
        kept = sim.quantizers["0.weight"].original.weight  # what was trained is the float model from now on
        assert torch.equal(kept.load(), before)
        assert "0.weight" in run(sim, data, "gptq", start="float").restarted
    else:
        assert torch.equal(before, rounded)


@pytest.mark.medium
def test_an_encoding_that_the_user_set_since_stays():
    _, sim, data = problem()
    run(sim, data, "gptq", holdout=0.0)
    sim.unfreeze("0.weight")
    present = sim.quantizers["0.weight"].encoding
    wider = qtk.Encoding(present.spec, present.scale * 1.5)
    sim.quantizers["0.weight"].load_encoding(wider)
    report = run(sim, data, "gptq(scales=False)", sites="0.weight", start="float", holdout=0.0)
    assert report.restarted == ("0.weight",)
    assert sim.quantizers["0.weight"].encoding.equals(wider)


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("travels", [copy.deepcopy, lambda sim: pickle.loads(pickle.dumps(sim))])
@pytest.mark.parametrize("offload", ["none", "disk"])
def test_copies_and_pickles_have_the_originals(travels, offload):
    _, sim, data = problem()
    run(sim, data, "gptq", offload=offload)
    try:
        other = travels(sim)
    except (pickle.PicklingError, AttributeError, TypeError):
        pytest.skip("a simulation cannot be pickled")
    del sim
    gc.collect()
    report = run(other, data, "seq_mse", start="float")
    assert report.restarted
    fresh = problem()[1]
    run(fresh, data, "seq_mse")
    assert_same(other, fresh)


@pytest.mark.medium
def test_files_and_state_dicts_do_not_have_them(tmp_path):
    model, sim, data = problem()
    keys = set(sim.model.state_dict())
    run(sim, data, "gptq", holdout=0.0)
    added = {key.rsplit(".", 1)[1] for key in set(sim.model.state_dict()) - keys}
    assert added <= {"frozen", "rewrote_weight"}
    sim.save(tmp_path / "sim")
    loaded = qtk.QuantSim.load(tmp_path / "sim", model, data[0])
    gone(loaded, data, "gptq")
    other = problem()[1]
    other.model.load_state_dict(sim.model.state_dict())
    gone(other, data, "gptq")
    run(sim, data, "seq_mse", start="float")  # while the saved one has its own


@pytest.mark.medium
def test_a_float_checkpoint_makes_them_void(tmp_path):
    model, sim, data = problem()
    run(sim, data, "gptq")
    sim.unfreeze()
    sim.load_float_state_dict(model.state_dict())
    assert all(quantizer.original is None for quantizer in sim.quantizers.values())
    assert not run(sim, data, "gptq").restarted


@pytest.mark.medium
def test_on_disk_they_are_files_that_go_with_the_simulation(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    _, sim, data = problem()
    run(sim, data, "gptq", offload="disk", holdout=0.0)
    gc.collect()
    assert len(os.listdir(tmp_path)) == 3
    run(sim, data, "gptq", offload="disk", start="float", holdout=0.0)
    gc.collect()
    assert len(os.listdir(tmp_path)) == 3
    for file in tmp_path.iterdir():
        file.unlink()
    gone(sim, data, "gptq")
    del sim
    gc.collect()
    assert not os.listdir(tmp_path)


@pytest.mark.medium
@pytest.mark.parametrize("start", ["float", "present"])
def test_a_second_call_that_fails_leaves_the_first_as_it_was(start):
    _, sim, data = problem()
    run(sim, data, "gptq")
    before = state(sim)
    originals = {name: quantizer.original for name, quantizer in sim.quantizers.items()}
    with pytest.raises(qtk.QtkError):
        run(sim, [data[0], torch.full_like(data[0], torch.nan)], "adaround", start=start)
    own = state(sim)
    assert own[1] == before[1]
    assert all(torch.equal(value, own[0][name]) for name, value in before[0].items())
    assert originals == {name: quantizer.original for name, quantizer in sim.quantizers.items()}


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("start", ["float", "present"])
def test_a_second_call_resumes_from_its_checkpoint_only_on_the_same_first_result(tmp_path, start):
    def twice(first, **options):
        _, sim, data = problem()
        run(sim, data, first)
        run(sim, data, "coordinate_descent", start=start, **options)
        return sim

    expected = twice("gptq")
    for _ in range(2):
        assert_same(twice("gptq", checkpoint_dir=tmp_path), expected)
    if start == "present":
        with pytest.raises(qtk.QtkError, match="another run: not the same results of an earlier run"):
            twice("gptq(act_order=False)", checkpoint_dir=tmp_path)
    else:
        assert_same(twice("gptq(act_order=False)", checkpoint_dir=tmp_path), expected)
