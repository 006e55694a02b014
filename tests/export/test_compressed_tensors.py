"""compressed-tensors files against the format written out here, and against Hugging Face's own library where it is."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import qtk
from qtk.errors import ExportError

X = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
BLOCKS = {"granularity": "per_block", "block_size": 32}
FORMATS = {
    "int4 in blocks": {"dtype": "int4", **BLOCKS},
    "int4 per channel": {"dtype": "int4"},
    "int8 per channel": {"dtype": "int8"},
    "int8 per tensor": {"dtype": "int8", "granularity": "per_tensor"},
    "narrow": {"dtype": "int8", "narrow_range": True},
    "uint4 in blocks": {"dtype": "uint4", "symmetric": False, **BLOCKS},
    "uint8 per channel": {"dtype": "uint8", "symmetric": False},
    "uint8 per tensor": {"dtype": "uint8", "symmetric": False, "granularity": "per_tensor"},
    "int4 with zero points": {"dtype": "int4", "symmetric": False, **BLOCKS},
    "symmetric uint8": {"dtype": "uint8", "symmetric": True},
    "lpbq": {"dtype": "lpbq_int4", "block_size": 32},
}


class Two(nn.Module):
    """Rows of 64 and of 37, which no word divides; a norm between."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 37)

    def forward(self, x):
        return self.last(self.norm(self.first(x)).relu())


def test_a_model_that_is_one_linear_layer_is_held(tmp_path):
    torch.manual_seed(0)
    sim = simulated(nn.Linear(64, 8), {"dtype": "int4", **BLOCKS})
    sim.export(tmp_path / "out", formats=("compressed_tensors",))
    (group,) = groups_of(tmp_path / "out")
    assert group["targets"] == ["Linear"]  # a module without a name is found by its class
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert set(tensors) == {"weight_packed", "weight_scale", "weight_shape", "bias"}
    own = sim.quantizers["weight"](sim.model.get_parameter("weight"))
    assert torch.equal(decoded({f".{name}": each for name, each in tensors.items()}, "", group["weights"]), own)


class Odd(nn.Sequential):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Linear(64, 37), nn.ReLU(), nn.Linear(37, 5, bias=False))


FLOAT_NORMS = {"match": {"op": "layer_norm"}, "weight": "float", "optional": True}


def simulated(model, weight, rules=(), x=X):
    config = {"version": 1, "defaults": {"weight": weight, "activation": "float"}, "rules": [FLOAT_NORMS, *rules]}
    sim = qtk.QuantSim(model.eval(), x, config=config)
    sim.compute_encodings(None, progress=False)
    return sim


def decoded(tensors, path, weights):
    """A weight by the words of the format: bit by bit, in Python."""
    bits, (rows, columns) = weights["num_bits"], tensors[f"{path}.weight_shape"].tolist()

    def numbers(words, count):
        whole = sum((int(word) & 0xFFFFFFFF) << (32 * index) for index, word in enumerate(words))
        return [((whole >> (bits * index)) & ((1 << bits) - 1)) - (1 << (bits - 1)) for index in range(count)]

    codes = torch.tensor([numbers(row, columns) for row in tensors[f"{path}.weight_packed"].tolist()])
    scale = tensors[f"{path}.weight_scale"]
    zero_point = torch.zeros_like(scale)
    if not weights["symmetric"]:
        stored = tensors[f"{path}.weight_zero_point"]
        zero_point = stored if weights["strategy"] == "tensor" else torch.tensor(
            [numbers(column, rows) for column in stored.t().tolist()]).t()
    if weights["strategy"] == "group":
        scale, zero_point = (each.repeat_interleave(weights["group_size"], 1) for each in (scale, zero_point))
    return (codes - zero_point).float() * scale


def groups_of(folder):
    return json.loads((folder / "config.json").read_text())["quantization_config"]["config_groups"].values()


@pytest.mark.sample(4)
@pytest.mark.medium
@pytest.mark.parametrize("weight", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("model", [Two, Odd])
def test_the_words_hold_the_weights_of_the_simulation(model, weight, tmp_path):
    if model is Odd and "block_size" in weight:
        pytest.skip("no block divides 37")
    sim = simulated(model(), weight)
    sim.export(tmp_path / "out", formats=("compressed_tensors",))
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    paths = [path for group in groups_of(tmp_path / "out") for path in group["targets"]]
    assert paths == (["first", "last"] if model is Two else ["0", "2"])
    for group in groups_of(tmp_path / "out"):
        for path in group["targets"]:
            own = sim.quantizers[f"{path}.weight"](sim.model.get_parameter(f"{path}.weight"))
            assert torch.equal(decoded(tensors, path, group["weights"]), own), path
    state = model().state_dict()
    others = {name: tensor for name, tensor in tensors.items() if ".weight_" not in name}
    assert others.keys() == state.keys() - {f"{path}.weight" for path in paths}
    assert all(torch.equal(tensor, state[name]) for name, tensor in others.items())


def test_the_library_of_the_format_restores_the_same_weights(tmp_path):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    for name, weight in FORMATS.items():
        sim = simulated(Two(), weight)
        sim.export(tmp_path / name, formats=("compressed_tensors",))
        tensors = load_file(tmp_path / name / "model.safetensors")
        config = json.loads((tmp_path / name / "config.json").read_text())["quantization_config"]
        for scheme in QuantizationConfig(**config).config_groups.values():
            compressor = BaseCompressor.get_value_from_registry(config["format"])
            for path in scheme.targets:
                prefix = f"{path}."
                own = {key.removeprefix(prefix): each for key, each in tensors.items() if key.startswith(prefix)}
                restored = compressor.decompress(own, scheme)["weight"]
                expected = sim.quantizers[f"{path}.weight"](sim.model.get_parameter(f"{path}.weight"))
                assert torch.equal(restored, expected), (name, path)


def test_two_kinds_of_weights_are_two_groups_and_float_layers_are_in_none(tmp_path):
    eight = {"match": {"path": "last"}, "weight": {"dtype": "int8", "granularity": "per_channel"}}
    sim = simulated(Two(), {"dtype": "int4", **BLOCKS}, [eight])
    sim.export(tmp_path / "out", formats=("compressed_tensors",))
    first, last = groups_of(tmp_path / "out")
    assert (first["targets"], first["weights"]["num_bits"], first["weights"]["group_size"]) == (["first"], 4, 32)
    assert (last["targets"], last["weights"]["num_bits"], last["weights"]["strategy"]) == (["last"], 8, "channel")


class Tied(nn.Module):
    def __init__(self, both):
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 64), nn.Linear(64, 8, bias=False)
        if both:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.embed(ids))


IDS = torch.tensor([[1, 2]])
FOUR_BITS = {"match": {"path": "head"}, "weight": {"dtype": "int4"}}


@pytest.mark.medium
@pytest.mark.parametrize(("model", "x", "weight", "rules", "message"), [
    (nn.Sequential(nn.Conv1d(4, 8, 1), nn.Linear(16, 3)), torch.randn(2, 4, 16), {"dtype": "int8"}, [],
     r"0.weight is read by conv1d"),
    (Two(), X, {"dtype": "int8"}, [{"match": {"op": "layer_norm"}, "weight": {"dtype": "int8"}}],
     "norm.weight is read by layer_norm"),
    (Two(), X, {"dtype": "int6"}, [], r"first.weight has int6 codes\n  last.weight has int6"),
    (Two(), X, {"dtype": "fp8_e4m3"}, [], r"first.weight has fp8_e4m3 codes"),
    (Tied(False), IDS, {"dtype": "int8"}, [], "embed.weight is read by embedding"),
    (Tied(True), IDS, {"dtype": "int8"}, [FOUR_BITS], "is read in another format, or in float, too"),
], ids=["conv", "norm", "width", "float", "embedding", "tied"])
def test_what_the_format_cannot_hold_is_named_and_nothing_is_written(model, x, weight, rules, message, tmp_path):
    sim = simulated(model, weight, rules, x)
    with pytest.raises(ExportError, match=message):
        sim.export(tmp_path / "out", formats=("compressed_tensors",))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.medium
def test_quantized_activations_are_named(tmp_path):
    sim = qtk.QuantSim(Two().eval(), X)
    sim.compute_encodings([X], progress=False)
    with pytest.raises(ExportError, match=r"x:input is an activation\n  first:out is"):
        sim.export(tmp_path / "out", formats=("compressed_tensors",))


def test_a_model_whose_ops_were_changed_is_refused(tmp_path):
    model = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8))
    with pytest.raises(ExportError, match="a transform has changed the ops of the model"):
        simulated(model, {"dtype": "int8"}).export(tmp_path / "out", formats=("compressed_tensors",))


@pytest.mark.medium
def test_a_file_that_differs_is_an_error(tmp_path):
    from qtk.export import compressed_tensors

    sim = simulated(Two(), {"dtype": "uint4", "symmetric": False, **BLOCKS})
    sim.export(tmp_path / "out", formats=("compressed_tensors",))
    path = tmp_path / "out" / "model.safetensors"
    good = load_file(path)
    for key in ("weight_packed", "weight_scale", "weight_zero_point"):
        changed = {name: tensor.clone() for name, tensor in good.items()}
        changed[f"first.{key}"][3, 1] += 1
        save_file(changed, path)
        with pytest.raises(ExportError, match=r"first.weight: its scales, zero points or integers are not those"):
            compressed_tensors.compare_with_simulation(tmp_path / "out", sim.model)
    path.write_bytes(b"short")
    with pytest.raises(ExportError, match="cannot read"):
        compressed_tensors.read(tmp_path / "out")


def test_two_layers_with_one_weight_are_refused(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(x).relu())

    sim = qtk.QuantSim(Tied().eval(), torch.randn(2, 32), weight_bits=4, activation_bits=None)
    sim.compute_encodings(None)
    with pytest.raises(ExportError, match=r"b\.weight shares the memory of a\.weight"):
        sim.export(tmp_path / "out", formats=["compressed_tensors"])
    assert not (tmp_path / "out").exists()
