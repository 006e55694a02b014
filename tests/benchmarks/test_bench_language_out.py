"""The arithmetic of loaded folders, as the benchmark writes it out, against the library that computes it."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

import qtk

PATH = Path(__file__).resolve().parents[2] / "benchmarks/models/bench_language_out.py"
INPUTS = {
    "int8 static": {"dtype": "int8", "symmetric": True, "granularity": "per_tensor"},
    "int8 token": {"dtype": "int8", "symmetric": True, "granularity": "per_token", "narrow_range": True},
    "fp8 static": {"dtype": "fp8_e4m3", "granularity": "per_tensor"},
    "fp8 token": {"dtype": "fp8_e4m3", "granularity": "per_token"},
}


def benchmark():
    spec = importlib.util.spec_from_file_location("bench_language_out", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", list(INPUTS))
def test_inputs_are_rounded_as_the_library_rounds_them(name, dtype):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, QuantizationStatus
    from compressed_tensors.quantization.lifecycle.forward import forward_quantize

    from qtk.export.compressed_tensors.arguments import input_arguments

    x = torch.randn(2, 7, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0, 0] = 0.0
    x[1, 2, 3] = 40.0  # beyond a calibrated range
    config = {"version": 1, "defaults": {"weight": "float", "activation": INPUTS[name]}}
    sim = qtk.QuantSim(nn.Linear(64, 8).to(dtype).eval(), x, config=config)
    sim.compute_encodings([x.clamp(-2, 2)], progress=False)
    qtk.round_scales(sim)
    quantizer = next(each for site, each in sim.quantizers.items() if "in" in site)
    args = QuantizationArgs(**input_arguments(quantizer.spec))
    layer = nn.Linear(64, 8)
    layer.quantization_scheme = QuantizationScheme(targets=["Linear"], input_activations=args)
    layer.quantization_status = QuantizationStatus.COMPRESSED
    if not args.dynamic:
        layer.input_scale = quantizer.encoding.scale.to(dtype)
    expected = forward_quantize(layer, x, "input", args)
    assert torch.equal(benchmark().loaded_input(x, quantizer), expected)
    is_in_float32 = dtype is torch.float32 and name != "int8 token"  # and this one has another scale
    assert torch.equal(quantizer(x), expected) is is_in_float32


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "scheme"), [
    ("bfloat16", "W8A8 static"), ("bfloat16", "FP8 per token"), ("float32", "W8A8 per token"), ("float32", "NVFP4 A16"),
])
def test_with_the_arithmetic_of_the_loader_logits_are_equal(dtype, scheme, tmp_path):
    pytest.importorskip("transformers")
    module = benchmark()
    model = module.built("llama", getattr(torch, dtype))
    prepared = qtk.prepare_model(model, module.tokens(0), dynamic_shapes="all")
    plain, equal = module.cell(prepared, model, module.SCHEMES[scheme], tmp_path / "out").split(", with the loader's ")
    assert float(plain) > 0
    assert equal.startswith("arithmetic 0 (")
