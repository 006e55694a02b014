"""Folders that are written, against the format written out here, and against Hugging Face's own library and loader."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import qtk
from qtk.errors import ExportError
from tests.export.compressed_tensors.models import BLOCKS, PER_TOKEN, STATIC, Transposed, Two, X, simulated

pytest.importorskip("compressed_tensors")

FORMATS = {
    "int4 in blocks": {"dtype": "int4", **BLOCKS},
    "int4 per channel": {"dtype": "int4", "granularity": "per_channel"},
    "int8 per channel": {"dtype": "int8", "granularity": "per_channel"},
    "int8 per tensor": {"dtype": "int8", "granularity": "per_tensor"},
    "narrow": {"dtype": "int8", "granularity": "per_channel", "narrow_range": True},
    "uint4 in blocks": {"dtype": "uint4", "symmetric": False, **BLOCKS},
    "uint8 per channel": {"dtype": "uint8", "granularity": "per_channel", "symmetric": False},
    "uint8 per tensor": {"dtype": "uint8", "granularity": "per_tensor", "symmetric": False},
    "int4 with zero points": {"dtype": "int4", "symmetric": False, **BLOCKS},
    "symmetric uint8": {"dtype": "uint8", "granularity": "per_channel", "symmetric": True},
}


CHANNELS = {"dtype": "int8", "granularity": "per_channel"}


class Odd(nn.Sequential):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Linear(64, 37), nn.ReLU(), nn.Linear(37, 5, bias=False))


def decoded(tensors, path, weights):
    """A packed weight by the words of the format: bit by bit, in Python."""
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


def config_of(folder):
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def own_weight(sim, name):
    return sim.quantizers[name](sim.model.get_parameter(name)).detach()


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


@pytest.mark.medium
def test_mxfp4_is_two_codes_a_byte_and_a_byte_of_exponent(tmp_path):
    sim = simulated(nn.Sequential(nn.Linear(64, 6)).bfloat16(), {"dtype": "mxfp4"}, x=X.bfloat16())
    sim.export(tmp_path / "out", formats=("compressed_tensors",))
    tensors, config = load_file(tmp_path / "out" / "model.safetensors"), config_of(tmp_path / "out")
    assert config["format"] == "mxfp4-pack-quantized"
    packed, exponents = tensors["0.weight_packed"], tensors["0.weight_scale"]
    nibbles = torch.stack([packed & 15, packed >> 4], -1).flatten(1).int()
    values = E2M1[nibbles & 7] * (1 - 2 * (nibbles >> 3)) * torch.exp2(exponents.repeat_interleave(32, 1).float() - 127)
    assert torch.equal(values, own_weight(sim, "0.weight").float())


@pytest.mark.medium
@pytest.mark.sample(4)
@pytest.mark.parametrize("weight", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("model", [Two, Odd])
def test_the_words_hold_the_weights_of_the_simulation(model, weight, tmp_path):
    if model is Odd and "block_size" in weight:
        pytest.skip("no block divides 37")
    sim = simulated(model(), weight)
    sim.export(tmp_path / "out", formats=("compressed_tensors",))
    tensors, config = load_file(tmp_path / "out" / "model.safetensors"), config_of(tmp_path / "out")
    (group,) = config["config_groups"].values()
    assert (group["targets"], config["format"], config["ignore"]) == (["Linear"], "pack-quantized", [])
    paths = ["first", "last"] if model is Two else ["0", "2"]
    for path in paths:
        assert torch.equal(decoded(tensors, path, group["weights"]), own_weight(sim, f"{path}.weight")), path
    state = model().state_dict()
    others = {name: tensor for name, tensor in tensors.items() if ".weight_" not in name}
    assert others.keys() == state.keys() - {f"{path}.weight" for path in paths}
    assert all(torch.equal(tensor, state[name]) for name, tensor in others.items())


@pytest.mark.medium
@pytest.mark.parametrize(("inputs", "weight"), [
    (PER_TOKEN, CHANNELS), (STATIC, CHANNELS),
    ({"dtype": "fp8_e4m3", "granularity": "per_token"}, {"dtype": "fp8_e4m3", "granularity": "per_channel"}),
    ({"dtype": "fp8_e4m3", "granularity": "per_tensor"}, {"dtype": "fp8_e4m3", "granularity": "per_tensor"}),
    ({"dtype": "uint8", "symmetric": False, "granularity": "per_tensor"}, CHANNELS),
    ({"dtype": "nvfp4"}, {"dtype": "nvfp4"}), ({"dtype": "mxfp4"}, {"dtype": "mxfp4"}),
])
def test_the_library_computes_what_is_simulated(inputs, weight, tmp_path):
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.lifecycle import forward as lifecycle

    kind = torch.bfloat16 if "fp4" in inputs["dtype"] else torch.float32
    sim = simulated(Two().to(kind), weight, inputs=inputs, x=X.to(kind))
    sim.export(tmp_path / "out", formats=("compressed_tensors",))
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    config = config_of(tmp_path / "out")
    (scheme,) = QuantizationConfig(**{key: each for key, each in config.items() if key != "version"}
                                   ).config_groups.values()
    own = {key.removeprefix("first."): each for key, each in tensors.items() if key.startswith("first.")}
    restored = BaseCompressor.get_value_from_registry(scheme.format).decompress(own, scheme)["weight"]
    assert torch.equal(restored, own_weight(sim, "first.weight"))
    args, quantizer = scheme.input_activations, sim.quantizers["first:in[0]"]
    if args.dynamic and args.type == "int":  # the library has half the span there; kernels, and the simulation, qmax
        scale, zero = X.abs().amax(-1, keepdim=True) / 127, None
    elif args.group_size:
        x, divisor = X.bfloat16(), own.get("input_global_scale")
        scale, zero = lifecycle.compute_dynamic_scales_and_zp(x, args, nn.Linear(1, 1), divisor)
        assert torch.equal(lifecycle.fake_quantize(x, scale, zero, args, divisor), quantizer(x))
        return
    elif args.dynamic:  # its tokens are those of [samples, tokens, width]
        scale, zero = lifecycle.compute_dynamic_scales_and_zp(X[None], args, nn.Linear(1, 1))[0][0], None
    else:
        scale, zero = own["input_scale"], own.get("input_zero_point")
    assert torch.equal(lifecycle.fake_quantize(X, scale, zero, args), quantizer(X))


def test_a_weight_with_inputs_first_is_described_in_blocks(tmp_path):
    sim = simulated(Transposed(), {"dtype": "int4", **BLOCKS})
    sim.export(tmp_path / "out", formats=("compressed_tensors",))
    config = config_of(tmp_path / "out")
    (group,) = config["config_groups"].values()
    assert (group["targets"], group["weights"]["block_structure"], config["dequantize"]) == (["inner"], [32, 1], True)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    scale = tensors["inner.weight_scale"].repeat_interleave(32, 0)
    codes = decoded(tensors | {"inner.weight_scale": torch.ones(1)}, "inner",
                    {"num_bits": 4, "symmetric": True, "strategy": "tensor"})
    assert torch.equal(codes * scale, own_weight(sim, "inner.weight"))


@pytest.mark.medium
def test_two_kinds_of_weights_are_two_groups_and_float_layers_are_ignored(tmp_path):
    eight = {"match": {"path": "last"}, "weight": {"dtype": "int8", "granularity": "per_channel"}}
    sim = simulated(Two(), {"dtype": "int4", **BLOCKS}, [eight])
    sim.export(tmp_path / "out", formats=("compressed_tensors",))
    last, first = config_of(tmp_path / "out")["config_groups"].values()
    assert (first["targets"], first["weights"]["num_bits"], first["weights"]["group_size"]) == (["Linear"], 4, 32)
    assert (last["targets"], last["weights"]["num_bits"], last["weights"]["strategy"]) == (["last"], 8, "channel")
    sim = simulated(Two(), {"dtype": "int4", **BLOCKS}, [{"match": {"path": "last"}, "weight": "float"}])
    sim.export(tmp_path / "ignored", formats=("compressed_tensors",))
    assert config_of(tmp_path / "ignored")["ignore"] == ["last"]


@pytest.mark.medium
def test_a_model_that_is_one_linear_layer_in_bfloat16(tmp_path):
    torch.manual_seed(0)
    sim = simulated(nn.Linear(64, 8).bfloat16(), {"dtype": "int4", **BLOCKS}, x=X.bfloat16())
    with pytest.warns(UserWarning, match=r"scales of 1 layers \(weight, …\) are rounded to bfloat16"):
        sim.export(tmp_path / "rounded", formats=("compressed_tensors",))
    qtk.round_scales(sim)
    sim.export(tmp_path / "out", formats=("compressed_tensors",))
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert set(tensors) == {"weight_packed", "weight_scale", "weight_shape", "bias"}
    assert tensors["weight_scale"].dtype is torch.bfloat16
    (group,) = config_of(tmp_path / "out")["config_groups"].values()
    found = decoded({f".{name}": each.float() if each.is_floating_point() else each for name, each in tensors.items()},
                    "", group["weights"])
    assert torch.equal(found.bfloat16(), own_weight(sim, "weight"))


@pytest.mark.medium
def test_a_file_that_differs_is_an_error(tmp_path):
    from qtk.export.compressed_tensors import folder

    sim = simulated(Two(), {"dtype": "uint4", "symmetric": False, **BLOCKS})
    sim.export(tmp_path / "out", formats=("compressed_tensors",))
    path = tmp_path / "out" / "model.safetensors"
    good = load_file(path)
    for key in ("weight_packed", "weight_scale", "weight_zero_point"):
        changed = {name: tensor.clone() for name, tensor in good.items()}
        changed[f"first.{key}"][3, 1] += 1
        save_file(changed, path)
        with pytest.raises(ExportError, match=r"first: the scales, zero points or integers differ"):
            folder.compare_with_simulation(tmp_path / "out", sim.model)
    sim = simulated(Two(), {"dtype": "int8", "granularity": "per_channel"}, inputs=STATIC)
    sim.export(tmp_path / "static", formats=("compressed_tensors",))
    good = load_file(tmp_path / "static" / "model.safetensors")
    save_file(good | {"last.input_scale": good["last.input_scale"] * 2}, tmp_path / "static" / "model.safetensors")
    with pytest.raises(ExportError, match=r"last: the scales"):
        folder.compare_with_simulation(tmp_path / "static", sim.model)
    path.write_bytes(b"short")
    with pytest.raises(ExportError, match="cannot read"):
        folder.read(tmp_path / "out")


@pytest.mark.medium
def test_a_config_that_differs_is_an_error(tmp_path):
    from qtk.export.compressed_tensors import folder

    sim = simulated(Two(), CHANNELS, inputs=PER_TOKEN)
    sim.export(tmp_path / "out", formats=("compressed_tensors",))
    path = tmp_path / "out" / "config.json"
    good = json.loads(path.read_text())

    def differs(match, **group):
        changed = json.loads(json.dumps(good))
        groups = changed["quantization_config"]["config_groups"]
        groups["group_0"] |= {key: each for key, each in group.items() if key != "again"}
        if "again" in group:
            groups["group_1"] = {**groups["group_0"], "input_activations": None}
        path.write_text(json.dumps(changed))
        with pytest.raises(ExportError, match=match):
            folder.compare_with_simulation(tmp_path / "out", sim.model)

    inputs = good["quantization_config"]["config_groups"]["group_0"]["input_activations"]
    differs("first: the config has", input_activations={**inputs, "strategy": "tensor", "dynamic": False})
    differs("first: the config has", input_activations=None)
    differs("first is a target of 2 groups", again=True)
    differs("first is a target of no group", targets=["other"])
    path.write_text(json.dumps(good))
    folder.compare_with_simulation(tmp_path / "out", sim.model)


def test_stacks_in_float_are_named_one_by_one():
    from qtk.export.compressed_tensors import folder
    from qtk.export.compressed_tensors.layers import Layers

    class Apart:
        """Takes stacks apart as transformers does: by their shape."""

        def __init__(self):
            with torch.device("meta"):
                self.module = nn.ModuleDict({"head": nn.Linear(4, 4, bias=False)})
                self.module.stack = nn.Parameter(torch.empty(2, 8, 4))

        def linear_modules(self):
            return ["head"]

        def stored(self, tensors):
            rows = {name: part for name, part in tensors.items() if part.ndim == 2}
            stacks = {name: torch.chunk(part, 2, dim=1) for name, part in tensors.items() if part.ndim == 3}
            return rows | {f"experts.{index}.{part}.weight": halves[place][index] for halves in stacks.values()
                           for place, part in enumerate("ab") for index in range(halves[place].shape[0])}

    found = folder._paths_in_float(Layers(in_float={"stack": None, "head.weight": None}), Apart(), [])
    assert set(found) == {"head", *(f"experts.{index}.{part}" for index in (0, 1) for part in "ab")}


@pytest.mark.medium
def test_a_tokenizer_is_written_beside(tmp_path):
    class Tokenizer:
        def save_pretrained(self, folder):
            with open(f"{folder}/tokenizer.json", "w") as file:
                file.write("{}")

    sim = simulated(nn.Sequential(nn.Linear(64, 8)), {"dtype": "int8"})
    sim.export(tmp_path / "out", formats="compressed_tensors", tokenizer=Tokenizer())
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    with pytest.raises(ExportError, match="a str has no such method"):
        sim.export(tmp_path / "other", formats="compressed_tensors", tokenizer="bert")
    with pytest.raises(ExportError, match="tokenizer=a Tokenizer has no effect on the formats encodings_json"):
        sim.export(tmp_path / "other", formats="encodings_json", tokenizer=Tokenizer())


@pytest.mark.slow
@pytest.mark.parametrize("target", ["vllm_w4a16", "vllm_fp8"])
@pytest.mark.parametrize("experts", [False, True])
def test_transformers_loads_the_folder_and_computes_the_same(target, experts, tmp_path):
    transformers = pytest.importorskip("transformers")
    arguments = {"vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
                 "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 32}
    torch.manual_seed(0)
    model = (transformers.MixtralForCausalLM(transformers.MixtralConfig(**arguments, num_local_experts=4)) if experts
             else transformers.LlamaForCausalLM(transformers.LlamaConfig(**arguments))).eval()
    batch = {"input_ids": torch.randint(0, 100, (2, 9)), "use_cache": False}
    rules = [{"match": {"path": "*"}, "weight": {**BLOCKS, "remainder": "float"}, "optional": True}]
    config = {"version": 1, "extends": target, **({"rules": rules} if target == "vllm_w4a16" else {})}
    sim = qtk.QuantSim(model, batch, config=config, dynamic_shapes="all")
    sim.compute_encodings(None, progress=False)
    sim.export(tmp_path / "out", formats="compressed_tensors")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    for name, quantizer in sim.quantizers.items():
        if experts and "experts" in name and ":" in name:
            quantizer.mode = qtk.Mode.BYPASS  # transformers has the inputs of experts in float
    with torch.no_grad():
        difference = (loaded(**batch).logits - sim.model(**batch).logits).abs().max()
    assert difference == 0


@pytest.mark.medium
def test_int4_blocks_of_an_odd_length_are_packed(tmp_path):
    sim = simulated(nn.Sequential(nn.Linear(24, 6)), {"dtype": "int4", "granularity": "per_block", "block_size": 3},
                    x=X[:, :24])
    sim.export(tmp_path / "out", formats=("compressed_tensors",))
    (group,) = config_of(tmp_path / "out")["config_groups"].values()
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(decoded(tensors, "0", group["weights"]), own_weight(sim, "0.weight"))
