"""Targets of servers against the formulas of vLLM's kernels, as the benchmark writes these out."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

import qtk

PATH = Path(__file__).resolve().parents[2] / "benchmarks/models/server_codes.py"
STATIC = {"granularity": "per_tensor", "dynamic": False}


def benchmark():
    spec = importlib.util.spec_from_file_location("server_codes", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("target", "kind", "rule", "largest", "allowed"), [
    ("vllm_w8a8", "int8 token", None, 127, 5e-4),  # vLLM multiplies by 127 / max: ties go the other way
    ("vllm_w8a8", "int8 static", {**STATIC, "narrow_range": False}, 127, 0.0),
    ("vllm_fp8", "E4M3 token", None, 448, 0.0),
    ("vllm_fp8", "E4M3 static", STATIC, 448, 0.0),
])
def test_inputs_have_the_codes_of_vllm(target, kind, rule, largest, allowed, dtype):
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(0)).to(dtype)
    rules = [] if rule is None else [{"match": {"op": "linear"}, "input": rule}]
    sim = qtk.QuantSim(nn.Linear(512, 4).to(dtype).eval(), x, config={"version": 1, "extends": target, "rules": rules})
    sim.compute_encodings([x], progress=False)
    qtk.round_scales(sim)
    (quantizer,) = [each for name, each in sim.quantizers.items() if name != "weight"]
    scale = x.float().abs().amax(-1, keepdim=True) / largest if rule is None else quantizer.encoding.scale
    codes = benchmark().of_vllm(x, scale)[kind]
    differ = quantizer(x) != (codes * scale).to(dtype)
    assert float(differ.float().mean()) <= allowed
    other = benchmark().of_transformers(x, scale)[kind] != codes
    assert bool(other.any()) is (dtype is torch.bfloat16 or kind == "int8 token")
