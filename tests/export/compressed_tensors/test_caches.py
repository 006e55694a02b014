"""Scales of keys and values in checkpoints: names, numbers, and what has none."""

import json
import re
import warnings

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import qtk
from qtk.errors import ExportError
from qtk.export.compressed_tensors.caches import caches_of

X = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (2, 8)).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj))
        return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)


class Layers(nn.Module):
    def __init__(self, of=Attention):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.ModuleDict({"self_attn": of()}) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer["self_attn"](x)
        return x


class Twice(nn.Module):
    """Two attentions in one module."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return (self.q(x) @ self.k(x).mT).softmax(-1) @ (x + 1) + (x @ (2 * self.q(x)).mT).softmax(-1) @ (x - 1)


class Latent(nn.Module):
    """Keys of two parts, one made from a latent, one of the position alone, which all heads share."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.kv_a, self.kv_b = nn.Linear(16, 24), nn.Linear(16, 12), nn.Linear(8, 32)

    def forward(self, x):
        q = self.q_proj(x).unflatten(-1, (2, 12)).transpose(1, 2)
        latent, shared = self.kv_a(x).split([8, 4], -1)
        k, v = self.kv_b(latent).unflatten(-1, (2, 16)).transpose(1, 2).chunk(2, -1)
        k = torch.cat([k, shared.cos()[:, None].expand(-1, 2, -1, -1)], -1)
        return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)


def simulated(model, granularity="per_tensor", dtype="fp8_e4m3", target="vllm_w8a8", **config):
    sim = qtk.QuantSim(model.eval(), X, config={
        "version": 1, "extends": target, "kv_cache": {"dtype": dtype, "granularity": granularity}, **config})
    sim.compute_encodings([X], progress=False)
    return sim


@pytest.mark.medium
@pytest.mark.parametrize(("dtype", "granularity", "shape", "said"), [
    ("fp8_e4m3", "per_tensor", (1,), {"type": "float", "strategy": "tensor"}),
    pytest.param("int8", "per_head", (2, 1, 1), {"type": "int", "strategy": "attn_head"}, marks=pytest.mark.slow),
])
def test_the_file_has_the_scales_of_the_simulation(dtype, granularity, shape, said, tmp_path):
    lifecycle = pytest.importorskip("compressed_tensors.quantization.lifecycle")
    from compressed_tensors.quantization import QuantizationArgs

    sim = simulated(Layers(), granularity, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sim.export(tmp_path / "out", formats="compressed_tensors")
    scheme = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["kv_cache_scheme"]
    assert {key: scheme[key] for key in said} == said
    assert (scheme["num_bits"], scheme["symmetric"], scheme["dynamic"]) == (8, True, False)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    names = [f"layers.{index}.self_attn.{which}_scale" for index in (0, 1) for which in "kv"]
    assert sorted(name for name in tensors if re.search(r"\.[kv]_scale$", name)) == names
    for name in names:
        (quantizer,) = caches_of(sim.model)[name]
        assert tensors[name].shape == shape
        assert torch.equal(tensors[name].flatten(), quantizer.scale.flatten())
        values = torch.randn(2, 2, 5, 8)
        theirs = lifecycle.fake_quantize(values, tensors[name], None, QuantizationArgs(**scheme))
        assert torch.equal(theirs, quantizer(values))


@pytest.mark.slow
def test_the_cache_alone_is_quantized(tmp_path):
    pytest.importorskip("compressed_tensors")
    sim = qtk.QuantSim(Layers().eval(), X, weight_bits=None, config={
        "version": 1, "rules": [{"match": {"path": "*"}, "output": "float"}], "kv_cache": {"dtype": "fp8_e4m3"}})
    sim.compute_encodings([X], progress=False)
    sim.export(tmp_path / "out", formats="compressed_tensors")
    written = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (written["config_groups"], written["format"], written["kv_cache_scheme"]["type"]) == ({}, "dense", "float")


@pytest.mark.medium
@pytest.mark.parametrize(("sim", "message"), [
    (lambda: simulated(Layers(), exclude=["layers.1*"]), "the keys of layers.1.self_attn are in float, and servers"),
    (lambda: simulated(Layers(Latent)), "the keys of layers.0.self_attn are assembled from several layers"),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        (lambda: simulated(Layers(), "per_token"), "has a scale for each token, computed at run time, of which a"),
        (lambda: simulated(Attention()), "servers read k_scale by the path of the module that computes attention"),
        (lambda: simulated(Layers(Twice)), r"layers.0.self_attn quantizes keys in several ways \(.*compute each"))),
])
def test_errors(sim, message, tmp_path):
    pytest.importorskip("compressed_tensors")
    with pytest.raises(ExportError, match=message):
        sim().export(tmp_path / "out", formats="compressed_tensors")


@pytest.mark.slow
def test_warnings(tmp_path):
    pytest.importorskip("compressed_tensors")
    sim = simulated(Layers(), dtype="int8")
    with pytest.warns(UserWarning, match="vLLM, SGLang and TensorRT-LLM hold caches in fp8_e4m3"):
        sim.export(tmp_path / "out", formats="compressed_tensors")
