"""``sim.save(directory, weights="integer")``: what comes back is what was simulated, bit for bit."""

import json
import warnings

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import qtk
from qtk.errors import EncodingError, ExportError, InternalError
from qtk.numerics.bit_packing import packed_bytes
from qtk.quantizers.quantizer import Mode
from qtk.workflow import store
from tests.zoo.models import ZOO
from tests.zoo.prepared import simulated, slow_but

X = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))


WITHOUT_WEIGHTS = ("weight_standardised",)
"""Models of which no parameter is quantized as it is."""


def layers(width=64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, 10)).eval()


def config(**weight):
    return {"version": 1, "defaults": {"weight": weight, "activation": {"dtype": "uint8"}}}


def calibrated(model=None, x=X, **options):
    sim = qtk.QuantSim(layers() if model is None else model, x, **options)
    sim.compute_encodings([x], progress=False)
    return sim


def round_trip(sim, model, folder, x=X):
    """The simulation as loaded into ``model``; whatever is not a packed weight must be equal."""
    sim.save(folder / "packed", weights="integer")
    again = qtk.QuantSim.load(folder / "packed", model, x)
    packed = json.loads((folder / "packed" / "sim.json").read_text())["packed"]
    own, other = sim.model.state_dict(), again.model.state_dict()
    assert own.keys() == other.keys()
    held = {own[name].data_ptr() for name in packed}
    assert all(torch.equal(own[name], other[name]) for name in own if own[name].data_ptr() not in held)
    return again, packed


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("weight", [
    {"dtype": "int8"}, {"dtype": "int4"}, {"dtype": "uint4", "symmetric": False}, {"dtype": "uint8", "symmetric": True},
    {"dtype": "int2"}, {"dtype": "int3", "symmetric": False}, {"dtype": "int5"}, {"dtype": "uint12"},
    {"dtype": "int16"}, {"dtype": "uint16", "symmetric": False}, {"dtype": "fp8_e4m3"}, {"dtype": "fp8_e5m2"},
    {"dtype": "fp6_e3m2"}, {"dtype": "fp6_e2m3"}, {"dtype": "fp4_e2m1"}, {"dtype": "mxfp4"}, {"dtype": "mxint8"},
    {"dtype": "nvfp4"}, {"dtype": "lpbq_int4", "block_size": 16}, {"dtype": "int8", "granularity": "per_tensor"},
    {"dtype": "int4", "granularity": "per_block", "block_size": 16},
], ids=lambda weight: "-".join(map(str, weight.values())))
def test_outputs_are_equal_and_the_file_holds_codes_side_by_side(weight, tmp_path):
    sim = calibrated(config=config(**weight))
    again, packed = round_trip(sim, layers(), tmp_path)
    assert list(packed) == ["0.weight", "2.weight"]
    assert torch.equal(again.model(X), sim.model(X))
    tensors = load_file(tmp_path / "packed" / "model.safetensors")
    for name in packed:
        quantizer, original = sim.quantizers[name], sim.model.get_parameter(name).detach()
        assert torch.equal(again.model.get_parameter(name), quantizer(original)), name
        size = tensors[name].numel() * tensors[name].element_size()
        assert size == packed_bytes(original.numel(), quantizer.spec.dtype.bits)
    assert torch.equal(tensors["0.bias"], sim.model.get_parameter("0.bias"))


@pytest.mark.medium
def test_saving_what_was_loaded_gives_the_same_file(tmp_path):
    again, _ = round_trip(calibrated(weight_bits=4), layers(), tmp_path)
    again.save(tmp_path / "second", weights="integer")
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("packed", "second"))
    assert first == second


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_other_float_types(dtype, bits, tmp_path):
    model = layers().to(dtype)
    sim = calibrated(model, X.to(dtype), weight_bits=bits)
    again, packed = round_trip(sim, model, tmp_path, X.to(dtype))
    assert again.model.get_parameter("0.weight").dtype == dtype
    assert torch.equal(again.model(X.to(dtype)), sim.model(X.to(dtype)))
    assert packed


@pytest.mark.sample(2)
@pytest.mark.medium
@pytest.mark.parametrize("name", slow_but([name for name in ZOO if name not in WITHOUT_WEIGHTS], "lstm", "tied", "vit"))
def test_every_model(name, tmp_path):
    sim = simulated(name, weight_bits=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sim.save(tmp_path / "packed", weights="integer")
    again = qtk.QuantSim.load(tmp_path / "packed", ZOO[name].model(), ZOO[name].inputs())
    for own, other in zip(*(tensors(ZOO[name].run(each.model, 2)) for each in (sim, again)), strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=0, equal_nan=True)


def tensors(output):
    return [leaf for leaf in torch.utils._pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]


class TwoReaders(nn.Module):
    """An embedding whose table is the weight of the last layer too."""

    def __init__(self):
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(20, 16), nn.Linear(16, 16), nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.body(self.embed(ids)).relu())


IDS = torch.tensor([[1, 2, 3], [4, 5, 19]])


@pytest.mark.medium
def test_a_tied_weight_is_stored_once_and_stays_tied(tmp_path):
    sim = calibrated(TwoReaders().eval(), IDS, weight_bits=4)
    again, packed = round_trip(sim, TwoReaders().eval(), tmp_path, IDS)
    assert set(packed) == {"embed.weight", "body.weight"}
    assert "head.weight" not in load_file(tmp_path / "packed" / "model.safetensors")
    assert again.model.get_parameter("embed.weight") is again.model.get_parameter("head.weight")
    assert torch.equal(again.model(IDS), sim.model(IDS))


@pytest.mark.medium
def test_a_weight_in_two_formats_stays_in_float(tmp_path):
    eight = {"version": 1, "defaults": {"weight": {"bits": 4}},
             "rules": [{"match": {"path": "head"}, "weight": {"bits": 8}}]}
    sim = calibrated(TwoReaders().eval(), IDS, config=eight)
    with pytest.warns(UserWarning, match=r"saved in float:\n  .*is read in another format"):
        again, packed = round_trip(sim, TwoReaders().eval(), tmp_path, IDS)
    assert list(packed) == ["body.weight"]
    assert torch.equal(again.model(IDS), sim.model(IDS))


class Views(nn.Module):
    """Two weights that are views of one tensor."""

    def __init__(self):
        super().__init__()
        whole = torch.randn(12, 64, generator=torch.Generator().manual_seed(1))
        self.first, self.second, self.last = whole[:8], whole[4:], nn.Linear(8, 4)

    def forward(self, x):
        return self.last((x @ self.first.t() + x @ self.second.t()).relu())


@pytest.mark.medium
def test_weights_that_share_memory_stay_in_float(tmp_path):
    sim = calibrated(Views().eval())
    with pytest.warns(UserWarning, match="memory"):
        again, packed = round_trip(sim, Views().eval(), tmp_path)
    assert list(packed) == ["last.weight"]
    assert torch.equal(again.model(X), sim.model(X))


@pytest.mark.medium
def test_learned_ranges_are_learned_on(tmp_path):
    sim = calibrated(weight_bits=4)
    sim.learn_ranges("*")
    with torch.no_grad():
        for parameter in sim.range_parameters():
            parameter.mul_(1.3)
    again, packed = round_trip(sim, layers(), tmp_path)
    assert list(packed) == ["0.weight", "2.weight"]
    assert torch.equal(again.model(X), sim.model(X))
    assert all(quantizer.learns_range for quantizer in again.quantizers.values())


@pytest.mark.medium
def test_rounded_weights_of_gptq_come_back(tmp_path):
    sim = calibrated(weight_bits=4)
    qtk.apply_layerwise(sim, [X], "gptq", options=qtk.LayerwiseOptions(holdout=0), progress=False)
    again, _ = round_trip(sim, layers(), tmp_path)
    own, other = (each.model.get_parameter("0.weight") for each in (sim, again))
    assert torch.equal(other, sim.quantizers["0.weight"](own))
    assert torch.equal(again.model(X), sim.model(X))
    assert again.quantizers["0.weight"].rewrote_weight


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("mode", [Mode.BYPASS, Mode.OBSERVE])
def test_a_weight_that_is_not_quantized_now_stays_in_float(mode, tmp_path):
    sim = calibrated()
    sim.quantizers["0.weight"].mode = mode
    with pytest.warns(UserWarning, match=rf"0.weight: its quantizer is in Mode.{mode.name}"):
        again, packed = round_trip(sim, layers(), tmp_path)
    assert list(packed) == ["2.weight"]
    assert torch.equal(again.model.get_parameter("0.weight"), sim.model.get_parameter("0.weight"))


@pytest.mark.medium
def test_what_has_no_encoding_is_refused_and_nothing_is_written(tmp_path):
    with pytest.raises(ExportError, match=r"no effect.*\n  0.weight: it has no encoding; run sim.compute_encodings"):
        qtk.QuantSim(layers(), X).save(tmp_path / "packed", weights="integer")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.medium
def test_live_batch_norms_are_refused_until_they_are_folded(tmp_path):
    x = torch.randn(4, 3, 8, 8)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
    sim = calibrated(model, x, config={"version": 1, "extends": "default", "fold_batch_norms": "at_export"})
    with pytest.raises(ExportError, match=r"0.weight: its batch norm is live.*qtk.fold_batch_norms\(sim\)"):
        sim.save(tmp_path / "packed", weights="integer")
    qtk.fold_batch_norms(sim)
    again, packed = round_trip(sim, model, tmp_path, x)
    assert list(packed) == ["0.weight"]
    assert torch.equal(again.model(x), sim.model(x))


class PythonHead(nn.Module):
    """Python code that cannot be captured, and reads a weight of a layer that can."""

    def __init__(self):
        super().__init__()
        self.embed, self.body, self.reads = nn.Embedding(20, 16), nn.Linear(16, 16), True

    def forward(self, ids):
        x = self.body(self.embed(ids))
        if float(x.sum()) > 1e9:
            x = -x
        return x @ self.embed.weight.t() if self.reads else x


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("reads", [True, False])
def test_a_weight_that_python_code_reads_too_is_refused(reads, tmp_path):
    torch.manual_seed(0)
    model = PythonHead().eval()
    model.reads = reads
    sim = calibrated(model, IDS, weight_bits=4)
    before = {name: tensor.clone() for name, tensor in sim.model.state_dict().items()}
    if reads:
        with pytest.raises(ExportError, match=r"Python code of it reads some of .*embed.weight"):
            sim.save(tmp_path / "packed", weights="integer")
        assert list(tmp_path.iterdir()) == []
    else:
        again, packed = round_trip(sim, model, tmp_path, IDS)
        assert set(packed) == {"embed.weight", "body.weight"}
        assert torch.equal(again.model(IDS), sim.model(IDS))
    assert all(torch.equal(tensor, sim.model.state_dict()[name]) for name, tensor in before.items())


@pytest.mark.medium
@pytest.mark.parametrize("change", [
    {"spec": 3}, {"quantizer": "elsewhere"}, {"spec": {"dtype": "int4"}}, {"quantizer": None},
])
def test_an_edited_record_is_refused_in_words(change, tmp_path):
    calibrated(weight_bits=4).save(tmp_path / "packed", weights="integer")
    path = tmp_path / "packed" / "sim.json"
    record = json.loads(path.read_text())
    record["packed"]["0.weight"] |= change
    path.write_text(json.dumps(record | {"digest": store._record_digest(record)}))
    with pytest.raises(EncodingError, match=r"0.weight cannot be restored from its codes") as caught:
        qtk.QuantSim.load(tmp_path / "packed", layers(), X)
    assert not isinstance(caught.value, InternalError)


def test_codes_of_another_width_are_refused(tmp_path):
    calibrated(weight_bits=4).save(tmp_path / "packed", weights="integer")
    path = tmp_path / "packed" / "sim.json"
    record = json.loads(path.read_text())
    record["packed"]["0.weight"]["spec"]["dtype"] = "int5"
    path.write_text(json.dumps(record | {"digest": store._record_digest(record)}))
    with pytest.raises(EncodingError, match=r"int5 codes of a tensor of shape \(32, 64\) are torch.uint8 of shape"):
        qtk.QuantSim.load(tmp_path / "packed", layers(), X)


def test_another_word_is_refused(tmp_path):
    with pytest.raises(qtk.QtkError, match="weights must be"):
        calibrated().save(tmp_path / "packed", weights="int4")
