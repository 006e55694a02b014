"""What transformers loads of exported language models, against the simulation: schemes x families, tiny and random.

    pip install 'qtk[llm]'; python benchmarks/models/bench_language_out.py [--families llama gpt2] [--dtype bfloat16]

A cell is the largest difference of the reloaded folder's logits from the simulation's, then, where the loader computes
otherwise, from the logits of the same simulation with the loader's arithmetic (``loaded_input``, ``as_loaded``); in
brackets the float model's difference, which says what a difference would be. ``refused`` is followed by qtk's reason,
``error`` by the loader's.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

import qtk
from qtk.export.compressed_tensors.layers import layers_of
from qtk.numerics.codes import codes_of, values_of

LAYERS = {"op": ["linear", "addmm", "grouped_matmul"]}
BLOCKS = {"granularity": "per_block", "block_size": 32, "remainder": "float"}
SCHEMES: dict[str, dict[str, object]] = {
    "W4A16 g32": {"extends": "vllm_w4a16", "rules": [{"match": {"path": "*"}, "weight": BLOCKS, "optional": True}]},
    "W4A16 g32 asymmetric": {"extends": "vllm_w4a16", "rules": [
        {"match": LAYERS, "weight": {**BLOCKS, "symmetric": False, "bits": 4}, "optional": True},
        {"match": {"lm_head": True}, "weight": "float", "optional": True},
        {"match": {"feeds": ["topk"]}, "weight": "float", "optional": True}]},
    "W8A16 channel": {"extends": "vllm_w8a8", "activation_bits": None},
    "W8A8 per token": {"extends": "vllm_w8a8"},
    "W8A8 static": {"extends": "vllm_w8a8", "rules": [{"match": LAYERS, "input": {
        "granularity": "per_tensor", "dynamic": False, "narrow_range": False}, "optional": True}]},
    "FP8 per token": {"extends": "vllm_fp8"},
    "FP8 static": {"extends": "vllm_fp8", "rules": [{"match": LAYERS, "input": {
        "granularity": "per_tensor", "dynamic": False}, "optional": True}]},
    "NVFP4 A16": {"extends": "vllm_nvfp4"},
    "MXFP4 A16": {"extends": "vllm_nvfp4", "rules": [
        {"match": LAYERS, "weight": {"dtype": "mxfp4"}, "optional": True},
        {"match": {"lm_head": True}, "weight": "float"},
        {"match": {"feeds": ["topk"]}, "weight": "float", "optional": True}]},
}
COMMON = {"vocab_size": 200, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 64}
FAMILIES = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", COMMON),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**COMMON, "head_dim": 16}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**COMMON, "head_dim": 16, "sliding_window": 16}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**COMMON, "sliding_window": 16}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**COMMON, "pad_token_id": 0}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**COMMON, "num_local_experts": 4}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {
        "vocab_size": 200, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 0,
        "eos_token_id": 0}),
}


def built(family: str, dtype: torch.dtype) -> torch.nn.Module:
    import transformers

    kind, config, arguments = FAMILIES[family]
    torch.manual_seed(0)
    # not .to(dtype), which would round the frequencies of rotary embeddings, too
    return getattr(transformers, kind)._from_config(getattr(transformers, config)(**arguments), dtype=dtype).eval()


def tokens(seed: int) -> dict[str, object]:
    generator = torch.Generator().manual_seed(seed)
    return {"input_ids": torch.randint(1, 200, (2, 24), generator=generator), "use_cache": False}


def reloaded(folder: Path, batch: dict[str, object]) -> torch.Tensor:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        logits: torch.Tensor = model(**batch).logits
    return logits


def loaded_input(x: torch.Tensor, quantizer: qtk.Quantizer) -> torch.Tensor:
    """``x`` as compressed-tensors 0.20 rounds the input of a layer that it has loaded: all in the dtype of ``x``.

    A static scale was stored in that dtype. The scale of a token is max|x| over half the span of the codes, 127.5 for
    int8, and the dtype's epsilon for a token of zeros.

    Shape: ``x`` [batch, tokens, width], as the library counts tokens; result the same.
    """
    spec = quantizer.spec
    lowest, highest = (-448, 448) if spec.dtype.name == "fp8_e4m3" else (-128, 127)
    if spec.dynamic:
        scale = x.abs().amax(-1, keepdim=True) / torch.tensor((highest - lowest) / 2, dtype=x.dtype)
        scale = torch.where(scale == 0, torch.finfo(x.dtype).eps, scale)
    else:
        scale = quantizer.encoding.scale.to(x.dtype)
    steps = (x / scale).clamp(lowest, highest)
    return (steps.round() if highest == 127 else steps.to(torch.float8_e4m3fn).to(x.dtype)) * scale


def loaded_weight(quantizer: qtk.Quantizer, given: tuple[torch.Tensor], result: torch.Tensor) -> torch.Tensor:
    """A forward hook: the weight in bfloat16, as compressed-tensors unpacks four-bit floats, then in its dtype."""
    encoding = quantizer.encoding
    return values_of(codes_of(given[0], encoding), encoding).bfloat16().to(result.dtype)


@contextmanager
def as_loaded(sim: qtk.QuantSim) -> Iterator[None]:
    """While the body runs, ``sim.model`` computes as what transformers 5.24 makes of its folder.

    Inputs of ``nn.Linear`` are rounded by ``loaded_input``; inputs of other layers are float; weights in four-bit
    floats are rounded to bfloat16.
    """
    layers = layers_of(sim.model).quantized
    is_dequantized = any(layer.is_dequantized for layer in layers.values())
    with ExitStack() as stack:
        for name, layer in layers.items():
            inputs, weight = layer.inputs, sim.quantizers[name]
            if weight.spec.dtype.name == "fp4_e2m1":
                stack.callback(weight.register_forward_hook(loaded_weight).remove)
            if inputs is None or inputs.mode is qtk.Mode.BYPASS:
                continue
            if layer.axes.stack or layer.is_transposed or is_dequantized:
                stack.callback(setattr, inputs, "mode", inputs.mode)
                inputs.mode = qtk.Mode.BYPASS
            else:
                stack.callback(inputs.register_forward_hook(
                    lambda module, given, result: loaded_input(given[0], module)).remove)
        yield


def cell(prepared, model, scheme: dict[str, object], folder: Path) -> str:
    scheme = dict(scheme)
    width = {"activation_bits": scheme.pop("activation_bits")} if "activation_bits" in scheme else {}
    batch = tokens(2)
    try:
        sim = qtk.QuantSim(prepared, tokens(0), config={"version": 1, **scheme}, **width)
        sim.compute_encodings([tokens(0), tokens(1)], progress=False)
        qtk.round_scales(sim)
        sim.export(folder, formats="compressed_tensors")
    except qtk.QtkError as error:
        return f"refused: {' '.join(str(error).split())[-250:]}"
    with torch.no_grad():
        expected, in_float = sim.model(**batch).logits, model(**batch).logits
        with as_loaded(sim):
            of_loader = sim.model(**batch).logits
    scale = float((expected - in_float).abs().max())
    try:
        found = reloaded(folder, batch)
        shown = f"{float((found - expected).abs().max()):.2g}"
        if not torch.equal(of_loader, expected):
            shown += f", with the loader's arithmetic {float((found - of_loader).abs().max()):.2g}"
    except Exception as error:  # whatever the loader raises
        shown = f"error: {type(error).__name__}: {str(error).splitlines()[0][:90]}"
    return f"{shown} ({scale:.2g})"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--schemes", nargs="*", default=list(SCHEMES))
    parser.add_argument("--dtype", default="float32")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for family in arguments.families:
        model = built(family, getattr(torch, arguments.dtype))
        prepared = qtk.prepare_model(model, tokens(0), dynamic_shapes="all")
        for name in arguments.schemes:
            with tempfile.TemporaryDirectory() as folder:
                print(f"{family:8} {name:22} {cell(prepared, model, SCHEMES[name], Path(folder) / 'out')}", flush=True)


if __name__ == "__main__":
    main()
