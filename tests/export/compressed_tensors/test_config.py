"""The config of a checkpoint."""

import json

import pytest
import torch

from qtk.export.compressed_tensors import config
from qtk.export.compressed_tensors.checkpoint import StoredLayer

pytest.importorskip("compressed_tensors")

from qtk.export.compressed_tensors.library import scheme_of

INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
INT4 = {**INT8, "num_bits": 4, "strategy": "group", "group_size": 32}
TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def stored(path, weights=INT4, inputs=None, **other):
    return StoredLayer(path, scheme_of(weights, inputs, []), {}, **other)


@pytest.mark.medium
def test_the_largest_group_is_all_linear_layers_and_experts_have_a_pattern(tmp_path):
    layers = [stored("a"), stored("b"), stored("m.experts.0.up", INT8, TOKENS)]
    config.write(layers, ["head", "head"], None, torch.float32, tmp_path)
    found = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    groups = list(found["config_groups"].values())
    assert [group["targets"] for group in groups] == [[r"re:^m\.experts\.\d+\.up$"], ["Linear"]]
    assert (found["ignore"], found["format"]) == (["head"], "mixed-precision")
    assert found["quantization_status"] == "compressed"
    assert [group["format"] for group in groups] == ["int-quantized", "pack-quantized"]
    assert "dequantize" not in found
    assert [scheme.weights.num_bits for scheme in config.read(tmp_path)[0].values()] == [8, 4]


STATIC = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False}


@pytest.mark.parametrize(("of", "patterns"), [
    (lambda layer, part: True, [r"re:^m\.\d+\.experts\.\d+\.w\d+$"]),
    (lambda layer, part: layer == "0", [r"re:^m\.0\.experts\.\d+\.w1$", r"re:^m\.0\.experts\.\d+\.w2$"]),
    (lambda layer, part: part == "w2", [r"re:^m\.0\.experts\.\d+\.w2$", r"re:^m\.1\.experts\.\d+\.w2$"]),
    (lambda layer, part: layer == "1" and part == "w1", [r"re:^m\.1\.experts\.\d+\.w1$"]),
])
def test_a_pattern_of_experts_is_of_one_group_alone(of, patterns):
    from compressed_tensors.utils.match import match_name

    paths = [f"m.{layer}.experts.{expert}.{part}" for layer in (0, 1) for expert in (0, 10) for part in ("w1", "w2")]
    schemes = {path: STATIC if of(path.split(".")[1], path.split(".")[-1]) else TOKENS for path in paths}
    own = [path for path in paths if schemes[path] is STATIC]
    linear = [stored(f"a{index}") for index in range(9)]
    found = config.quantization_config([stored(path, INT8, schemes[path]) for path in paths] + linear, [])
    groups = {group["input_activations"]["strategy"]: group["targets"] for group in found["config_groups"].values()
              if group["input_activations"]}
    assert [path for path in paths if any(match_name(path, each) for each in groups["tensor"])] == own
    if own != paths:
        assert [path for path in paths if any(match_name(path, each) for each in groups["token"])] == [
            path for path in paths if path not in own]
    assert sorted(groups["tensor"]) == patterns
    ignored = config.quantization_config([*linear, *(stored(path, INT8) for path in own)],
                                         [path for path in paths if path not in own])["ignore"]
    assert [path for path in paths if any(match_name(path, each) for each in ignored)] == [
        path for path in paths if path not in own]


@pytest.mark.medium
@pytest.mark.parametrize(("layer", "expected"), [
    (("a", {**INT4, "symmetric": False}), True), (("a", {**INT8, "symmetric": False}, TOKENS), False), (("a",), False),
])
def test_what_transformers_reads_only_dequantized_says_so(layer, expected):
    found = config.quantization_config([stored(*layer, is_dequantized=expected), stored("b")], [])
    assert ("dequantize" in found) is expected


@pytest.mark.medium
def test_weights_with_inputs_first_are_named():
    blocks = {**INT4, "strategy": "block", "block_structure": [32, 1]}
    del blocks["group_size"]
    found = config.quantization_config([stored("h.c", blocks, is_transposed=True, is_dequantized=True)], [])
    assert (found["config_groups"]["group_0"]["targets"], found["dequantize"]) == (["h.c"], True)
