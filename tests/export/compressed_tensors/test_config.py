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
    assert [group["targets"] for group in groups] == [["Linear"], [r"re:^m\.experts\.\d+\.up$"]]
    assert (found["ignore"], found["format"]) == (["head"], "mixed-precision")
    assert found["quantization_status"] == "compressed"
    assert [group["format"] for group in groups] == ["pack-quantized", "int-quantized"]
    assert "dequantize" not in found
    assert [scheme.weights.num_bits for scheme in config.read(tmp_path).values()] == [4, 8]


@pytest.mark.medium
@pytest.mark.parametrize(("layer", "expected"), [
    (("a", {**INT4, "symmetric": False}), True), (("a", {**INT8, "symmetric": False}, TOKENS), False), (("a",), False),
])
def test_what_transformers_reads_only_dequantized_says_so(layer, expected):
    assert ("dequantize" in config.quantization_config([stored(*layer)], [])) is expected


@pytest.mark.medium
def test_weights_with_inputs_first_are_named():
    blocks = {**INT4, "strategy": "block", "block_structure": [32, 1]}
    del blocks["group_size"]
    found = config.quantization_config([stored("h.c", blocks, is_transposed=True)], [])
    assert (found["config_groups"]["group_0"]["targets"], found["dequantize"]) == (["h.c"], True)
