import json
import random
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

import qtk
from qtk.atomic import MARKER
from qtk.core.dtypes import dtype
from qtk.core.plan import QuantPlan
from qtk.core.site import Site
from qtk.core.spec import QuantSpec
from qtk.errors import EncodingError, ExportError, InternalError
from qtk.graph.insert import drop_sites, insert
from qtk.graph.simulation import Simulation
from qtk.quantizers.quantizer import Mode
from qtk.workflow import store
from qtk.workflow.store import load, restore, save
from tests.export.onnx.simulated import activations, planned, symmetric
from tests.planning.branching_net import reasons

ARGUMENTS = {"scheme": "min_max", "weight_bits": 4, "activation_bits": None, "config": {"version": 1}}


class Tied(nn.Module):
    """Tied and non-contiguous parameters, a buffer of each dtype, an empty one."""

    def __init__(self, width=8, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.head = nn.Embedding(20, width), nn.Linear(width, 20, bias=False)
        self.head.weight = self.embed.weight
        self.conv = nn.Conv2d(1, 4, 3).to(memory_format=torch.channels_last)
        self.conv.weight.data = torch.randn(3, 3, 1, 4).permute(3, 2, 0, 1)
        self.norm = nn.BatchNorm2d(4)
        self.register_buffer("brain", torch.randn(5, dtype=torch.bfloat16))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("empty", torch.zeros(0, 3))
        whole = torch.randn(6)
        self.register_buffer("front", whole[:4])
        self.register_buffer("back", whole[2:])

    def forward(self, ids):
        x = self.head(self.embed(ids))
        return self.norm(self.conv(x[:, None])).relu() + self.brain.sum().float() + self.front.sum()


IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])


def fresh(model=None, **choices):
    """A simulation without encodings, and encodings for it."""
    choices = {"weight": symmetric(), "activation": activations()} | choices
    prepared, plan, encodings = planned(model or Tied(), IDS, **choices)
    simulation = Simulation(prepared, plan, insert(prepared, plan))
    for quantizer in simulation.quantizers.values():
        quantizer.mode = Mode.SIMULATE
    return simulation, encodings


def calibrated(**choices):
    simulation, encodings = fresh(**choices)
    for site, quantizer in simulation.quantizers.items():
        quantizer.load_encoding(encodings[site.name])
    return simulation


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    simulation = calibrated()
    directory = tmp_path_factory.mktemp("saved") / "sim"
    save(directory, simulation, arguments=ARGUMENTS)
    return directory, simulation


@pytest.mark.medium
def test_a_fresh_simulation_becomes_the_stored_one(saved):
    directory, simulation = saved
    stored = load(directory)
    assert stored.arguments == ARGUMENTS
    other, _ = fresh(Tied(seed=1))
    assert restore(stored, other) is other
    state, expected = other.model.state_dict(), simulation.model.state_dict()
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert state[name].dtype == tensor.dtype
        assert torch.equal(state[name], tensor), name
    with torch.no_grad():
        assert torch.equal(other.model(IDS), simulation.model(IDS))
    assert dict(stored.plan.sites) == dict(simulation.plan.sites)


@pytest.mark.medium
def test_layout_of_the_loading_model_is_kept(saved):
    other, _ = fresh(Tied(seed=1))
    strides = other.model.get_parameter("conv.weight").stride()
    restore(load(saved[0]), other)
    assert other.model.get_parameter("conv.weight").stride() == strides


@pytest.mark.medium
def test_a_tied_tensor_is_written_once_and_stays_tied(saved):
    directory, _ = saved
    tensors = load_file(directory / "model.safetensors")
    assert ("embed.weight" in tensors) != ("head.weight" in tensors)
    other, _ = fresh(Tied(seed=1))
    restore(load(directory), other)
    assert other.model.get_parameter("embed.weight") is other.model.get_parameter("head.weight")


def test_nothing_on_disk_is_a_pickle(saved):
    directory, _ = saved
    assert {path.name for path in directory.iterdir()} == {MARKER, "model.safetensors", "sim.json"}
    json.loads((directory / "sim.json").read_text())
    assert b"\x80\x04" not in (directory / "model.safetensors").read_bytes()[:16]


@pytest.mark.medium
def test_uncalibrated_simulations_can_be_stored(tmp_path):
    simulation, _ = fresh()
    save(tmp_path / "sim", simulation, arguments=ARGUMENTS)
    other, _ = fresh(Tied(seed=1))
    restore(load(tmp_path / "sim"), other)
    assert all(quantizer.encoding is None for quantizer in other.quantizers.values())


@pytest.mark.medium
def test_learned_ranges_come_back_as_what_is_exported(tmp_path):
    simulation, encodings = fresh()
    for site, quantizer in simulation.quantizers.items():
        quantizer.load_encoding(encodings[site.name])
        quantizer.learn_range()
    save(tmp_path / "sim", simulation, arguments=ARGUMENTS)
    other, _ = fresh(Tied(seed=1))
    restore(load(tmp_path / "sim"), other)
    for site, quantizer in other.quantizers.items():
        assert quantizer.encoding.equals(encodings[site.name]), site


@pytest.mark.medium
def test_sites_that_calibration_took_out_are_taken_out_again(tmp_path):
    simulation = calibrated()
    masked = next(site for site in simulation.plan if site.name == "conv:out")
    simulation = drop_sites(simulation, {masked: "carries a mask"})
    save(tmp_path / "sim", simulation, arguments=ARGUMENTS)
    other, _ = fresh(Tied(seed=1))
    restored = restore(load(tmp_path / "sim"), other)
    assert masked not in restored.plan
    assert masked not in restored.quantizers
    assert restored.plan.unquantized[masked] == "carries a mask"
    with torch.no_grad():
        assert torch.equal(restored.model(IDS), simulation.model(IDS))


def test_another_model_is_refused_and_left_as_it_was(saved):
    other, _ = fresh(Tied(width=16, seed=1))
    before = other.model.get_parameter("conv.weight").clone()
    with pytest.raises(EncodingError, match=r"tensor embed.weight is stored as float32 \(20, 8\), the model's is .*16"):
        restore(load(saved[0]), other)
    assert torch.equal(other.model.get_parameter("conv.weight"), before)


@pytest.mark.medium
def test_missing_extra_and_different_sites_are_named(saved):
    stored = load(saved[0])
    other, _ = fresh(Tied(seed=1))
    sites = dict(other.plan.sites)
    renamed = sites.pop(next(site for site in sites if site.name == "conv:out"))
    changed = next(site for site in sites if site.name == "relu:out")
    sites[Site("conv_1", "", "out")] = renamed
    sites[changed] = replace(sites[changed], spec=QuantSpec(dtype("uint4")))
    with pytest.raises(EncodingError) as caught:
        restore(stored, replace(other, plan=QuantPlan(sites)))
    message = str(caught.value)
    assert "conv:out is stored, the model has no such site; did you mean 'conv_1:out'?" in message
    assert "conv_1:out is quantized in the model, but not stored; did you mean 'conv:out'?" in message
    assert "relu:out is stored as uint8 per_tensor asymmetric, planned here as uint4" in message


@pytest.mark.medium
def test_missing_and_extra_tensors_are_named(saved):
    stored = load(saved[0])
    other, _ = fresh(Tied(seed=1))
    state = dict(stored.state)
    state["conv.weights"] = state.pop("conv.weight")
    with pytest.raises(EncodingError, match=r"conv.weights is stored, .* did you mean 'conv.weight'") as caught:
        restore(replace(stored, state=state), other)
    assert "tensor conv.weight of the model is not stored; did you mean 'conv.weights'?" in str(caught.value)


@pytest.mark.medium
def test_another_float_type_is_named(saved):
    other, _ = fresh(Tied(seed=1))
    other.model.half()
    with pytest.raises(EncodingError, match=r"conv.bias is stored as float32 \(4,\), the model's is float16"):
        restore(load(saved[0]), other)


def test_long_lists_are_cut(saved):
    other, _ = fresh(nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 4)))
    with pytest.raises(EncodingError, match=r"and \d+ more$"):
        restore(load(saved[0]), other)


def test_existing_directory_needs_force(saved, tmp_path):
    _, simulation = saved
    save(tmp_path / "sim", simulation, arguments={})
    with pytest.raises(ExportError, match="exists already"):
        save(tmp_path / "sim", simulation, arguments=ARGUMENTS)
    assert load(tmp_path / "sim").arguments == {}
    save(tmp_path / "sim", simulation, arguments=ARGUMENTS, force=True)
    assert load(tmp_path / "sim").arguments == ARGUMENTS


def test_missing_and_broken_files(saved, tmp_path):
    _, simulation = saved
    with pytest.raises(EncodingError, match="cannot read"):
        load(tmp_path / "nowhere")
    save(tmp_path / "sim", simulation, arguments=ARGUMENTS)
    save_file({"other": torch.zeros(2)}, tmp_path / "sim" / "model.safetensors")
    with pytest.raises(EncodingError, match="the files are of two simulations"):
        load(tmp_path / "sim")
    (tmp_path / "sim" / "model.safetensors").write_bytes(b"short")
    with pytest.raises(EncodingError, match=r"model.safetensors is damaged"):
        load(tmp_path / "sim")
    (tmp_path / "sim" / "model.safetensors").unlink()
    with pytest.raises(EncodingError, match=r"cannot read .*model.safetensors"):
        load(tmp_path / "sim")


@pytest.mark.parametrize(
    ("change", "message"), [({"version": 1}, "version 1 is not known"), ({"plan": 3}, "is damaged or was edited")]
)
def test_other_versions_and_files(change, message, saved, tmp_path):
    record = json.loads((saved[0] / "sim.json").read_text())
    (tmp_path / "sim.json").write_text(json.dumps(record | change))
    with pytest.raises(EncodingError, match=message):
        load(tmp_path)


class Unregistered(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.shift = [nn.Linear(8, 8)], torch.randn(8)
        self.out = nn.Linear(8, 2)
        self.register_buffer("table", torch.randn(8), persistent=False)

    def forward(self, x):
        return self.out(self.layers[0](x).relu() + self.shift + self.table)


@pytest.mark.medium
def test_tensors_that_are_in_no_state_dict_are_stored_too(tmp_path):
    x = torch.randn(4, 8)
    sim = qtk.QuantSim(Unregistered().eval(), x)
    sim.compute_encodings([x], progress=False)
    sim.save(tmp_path / "sim")
    again = qtk.QuantSim.load(tmp_path / "sim", Unregistered().eval(), x)
    assert torch.equal(again.model(x), sim.model(x))
    assert "table" not in again.model.state_dict()


def test_a_full_disk_is_an_export_error_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*args: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    sim = qtk.QuantSim(nn.Linear(8, 4).eval(), torch.randn(2, 8))
    monkeypatch.setattr("qtk.workflow.store.save_file", full)
    with pytest.raises(ExportError, match="No space left on device"):
        sim.save(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_flipped_bit_anywhere_is_noticed(saved, tmp_path):
    generator = random.Random(0)
    for name in ("model.safetensors", "sim.json"):
        good = (saved[0] / name).read_bytes()
        for _ in range(60):
            copied = tmp_path / "copied"
            shutil.copytree(saved[0], copied)
            flipped = bytearray(good)
            flipped[generator.randrange(len(good))] ^= 1 << generator.randrange(8)
            (copied / name).write_bytes(bytes(flipped))
            with pytest.raises(EncodingError):
                load(copied)
            shutil.rmtree(copied)


@pytest.mark.medium
@pytest.mark.parametrize(("name", "value", "message"), [
    ("scale", 0.0, "every scale must be finite and positive"), ("scale", -1.0, "every scale must be"),
    ("scale", torch.nan, "every scale must be"), ("zero_point", 300, "every zero point must lie in 0…255"),
])
def test_what_no_encoding_holds_is_refused(name, value, message, saved):
    stored = load(saved[0])
    key = next(key for key in stored.state if key.endswith(f".{name}"))
    stored.state[key].fill_(value)
    simulation, _ = fresh()
    with pytest.raises(EncodingError, match=message):
        restore(stored, simulation)
    assert all(quantizer.encoding is None for quantizer in simulation.quantizers.values())


@pytest.mark.medium
def test_a_model_that_computes_something_else_is_refused(tmp_path):
    x = torch.randn(4, 8)
    models = [nn.Sequential(nn.Linear(8, 8), middle, nn.Linear(8, 2)).eval() for middle in (nn.GELU(), nn.SiLU())]
    sim = qtk.QuantSim(models[0], x)
    sim.compute_encodings([x], progress=False)
    sim.save(tmp_path / "sim")
    assert list(sim.plan) == list(qtk.QuantSim(models[1], x).plan)
    with pytest.raises(EncodingError, match="its ops, or their arguments, are not the same"):
        qtk.QuantSim.load(tmp_path / "sim", models[1], x)


@pytest.mark.medium
def test_flags_are_stored(tmp_path):
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).eval(), torch.randn(32, 8)
    sim = qtk.QuantSim(model, x)
    sim.compute_encodings([x], progress=False)
    qtk.apply_gptq(sim, [x], sites="0.weight", options=qtk.LayerwiseOptions(holdout=0.0),
                   progress=False)  # on data held out it might lose
    sim.freeze("1:out")
    sim.save(tmp_path / "sim")
    again = qtk.QuantSim.load(tmp_path / "sim", model, x)
    assert [name for name, quantizer in again.quantizers.items() if quantizer.frozen] == ["0.weight", "1:out"]
    assert [name for name, quantizer in again.quantizers.items() if quantizer.rewrote_weight] == ["0.weight"]


@pytest.mark.medium
def test_version_4_had_the_flags_beside_the_tensors(tmp_path):
    simulation = calibrated()
    save(tmp_path / "sim", simulation, arguments=ARGUMENTS)
    path = tmp_path / "sim" / "sim.json"
    record = json.loads(path.read_text())
    frozen, rewrote = "conv:out", "conv.weight"
    record |= {"version": 4, "flags": {"frozen": [frozen], "rewrote_weight": [rewrote], "bypassed": []}}
    path.write_text(json.dumps(record | {"digest": store._record_digest(record)}))
    assert any(name.endswith("zero_point") for name in record["tensors"])
    assert all(kind[0] == "int32" for name, kind in record["tensors"].items() if name.endswith("zero_point"))
    other, _ = fresh(Tied(seed=1))
    restore(load(tmp_path / "sim"), other)
    flags = {site.name: (q.frozen, q.rewrote_weight) for site, q in other.quantizers.items()}
    assert [name for name, (is_frozen, _) in flags.items() if is_frozen] == [frozen]
    assert [name for name, (_, is_rewritten) in flags.items() if is_rewritten] == [rewrote]
    for site, quantizer in simulation.quantizers.items():
        assert other.quantizers[site].encoding.equals(quantizer.encoding)


@pytest.mark.medium
@pytest.mark.parametrize("change", [
    {"tied": {"0.weight": {}}}, {"flags": {"frozen": None}}, {"arguments": {"in_place": True}},
    {"arguments": {"nonsense": 3}}, {"plan": {}}, {"steps": [3]}, {"calls": 3}, {"calls": [3]},
])
def test_an_edited_file_with_a_right_digest_is_refused_in_words(change, tmp_path):
    made = qtk.QuantSim(torch.nn.Linear(4, 2).eval(), torch.randn(8, 4))
    made.save(tmp_path / "saved")
    path = tmp_path / "saved" / "sim.json"
    record = {**json.loads(path.read_text(encoding="utf-8")), **change}
    record["digest"] = store._record_digest(record)
    path.write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(qtk.QtkError) as caught:
        qtk.QuantSim.load(tmp_path / "saved", torch.nn.Linear(4, 2).eval(), torch.randn(8, 4))
    assert not isinstance(caught.value, InternalError)


@pytest.mark.medium
def test_modes_are_stored(tmp_path):
    x, model = torch.randn(8, 4), nn.Sequential(nn.Linear(4, 2), nn.ReLU()).eval()
    sim = qtk.QuantSim(model, x)
    sim.compute_encodings([x], progress=False)
    sim.quantizers["0.weight"].mode = Mode.BYPASS
    sim.save(tmp_path / "saved")
    again = qtk.QuantSim.load(tmp_path / "saved", model, x)
    modes = {name: quantizer.mode for name, quantizer in again.quantizers.items()}
    assert modes == {"input:input": Mode.SIMULATE, "0.weight": Mode.BYPASS, "1:out": Mode.SIMULATE}
    assert torch.equal(again.model(x), sim.model(x))


@pytest.mark.medium
def test_the_mode_of_an_observer_is_not_stored_with_it(tmp_path):
    x, model = torch.randn(8, 4), nn.Sequential(nn.Linear(4, 2), nn.ReLU()).eval()
    sim = qtk.QuantSim(model, x)
    sim.quantizers["1:out"].mode = Mode.OBSERVE
    sim.save(tmp_path / "saved")
    again = qtk.QuantSim.load(tmp_path / "saved", model, x)
    assert {quantizer.mode for quantizer in again.quantizers.values()} == {Mode.SIMULATE}


@pytest.mark.medium
def test_an_excluded_batch_norm_is_not_folded_and_exclusions_survive_saving(tmp_path):
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1)).eval()
    images = torch.randn(2, 3, 6, 6)
    made = qtk.QuantSim(net, images, config={"version": 1, "extends": "default", "exclude": ["1", "3"]})
    made.compute_encodings([images], progress=False)
    assert reasons(made)["1:out"] == "excluded by exclude: 1"
    assert reasons(made)["2:out"] == "read by 3, excluded by exclude: 3"
    made.save(tmp_path / "saved")
    again = qtk.QuantSim.load(tmp_path / "saved", net, images)
    assert reasons(again) == reasons(made)
    assert torch.equal(again.model(images), made.model(images))


@pytest.mark.medium
def test_a_saved_simulation_is_loaded(tmp_path):
    x = 3 * torch.randn(2, 3, 8, 8)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.SiLU(), nn.Conv2d(4, 4, 1)).eval()
    sim = qtk.QuantSim(model, x, config={"version": 1, "split_gates": True})
    sim.compute_encodings([x], progress=False)
    sim.save(tmp_path / "saved")
    loaded = qtk.QuantSim.load(tmp_path / "saved", model, x)
    assert torch.equal(loaded.model(x), sim.model(x))
