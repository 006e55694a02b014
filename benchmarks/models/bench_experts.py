"""Mixtures of experts of transformers: the gain of layer-wise methods on a trained one, and what they leave of others.

A decoder of the form of Mixtral (2 layers of width 128, 8 experts of width 256, 2 for a token) is trained on the bytes
of Python's standard library, so that its router sends tokens where they belong. Weights of int3 in blocks of 128,
router and head in float; 48 sequences of 128 bytes to calibrate, 48 others to judge by. KL is the divergence of the
float model's next bytes from the simulation's, SQNR that of the logits; once with stacked experts, once with an
``nn.Linear`` for each matrix.

Families: tiny models with random weights; a method's cell is the number of experts' weights whose error falls on the
data that are held out, of all, then those left as they are.

    pip install "qtk[hf]"
    python benchmarks/models/bench_experts.py [--training-steps 400] [--only mixtral gpt-oss]
"""

from __future__ import annotations

import argparse
import copy
import sysconfig
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from language_families import VOCABULARY, causal
from torch import Tensor, nn

import qtk
from qtk.config.load import load_config
from qtk.errors import CalibrationError
from qtk.numerics.error import decibels

LENGTH, CALIBRATED, JUDGED = 128, 48, 48
METHODS = "seq_mse", "gptq", "coordinate_descent", "adaround(iterations=30)", "bias_correction"
FAMILIES = "mixtral", "qwen3-moe", "gpt-oss", "deepseek-v3"
ALL = qtk.LayerwiseOptions(calibrate_all_experts=True)


class Separate(nn.Module):
    """The experts of Mixtral, a linear layer for each matrix, each on the rows that chose it."""

    def __init__(self, stacked: Any) -> None:
        super().__init__()
        self.up, self.down = (nn.ModuleList(nn.Linear(stack.shape[2], stack.shape[1], bias=False) for _ in stack)
                              for stack in (stacked.gate_up_proj, stacked.down_proj))
        with torch.no_grad():
            for layers, stack in ((self.up, stacked.gate_up_proj), (self.down, stacked.down_proj)):
                for layer, matrix in zip(layers, stack, strict=True):
                    layer.weight.copy_(matrix)  # type: ignore[operator]

    def forward(self, x: Tensor, expert: Tensor, share: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        for index, (up_proj, down_proj) in enumerate(zip(self.up, self.down, strict=True)):
            rows, places = torch.where(expert == index)
            gate, up = up_proj(x[rows]).chunk(2, -1)
            result = result.index_add(0, rows, down_proj(nn.functional.silu(gate) * up) * share[rows, places, None])
        return result


def standard_library() -> Tensor:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:80]
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()


def sequences(data: Tensor, count: int, seed: int) -> Tensor:
    """The last tenth of the data, which no training sees, has all even seeds."""
    generator, cut = torch.Generator().manual_seed(seed), len(data) * 9 // 10
    first, last = (cut, len(data)) if seed % 2 == 0 else (0, cut)
    starts = torch.randint(first, last - LENGTH, (count,), generator=generator)
    return torch.stack([data[at:at + LENGTH] for at in starts])


def trained(data: Tensor, steps: int) -> nn.Module:
    transformers = import_module("transformers")
    torch.manual_seed(0)
    model: nn.Module = transformers.MixtralForCausalLM(transformers.MixtralConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=256,
        output_router_logits=True, router_aux_loss_coef=0.01, pad_token_id=None, bos_token_id=None, eos_token_id=None))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps)
    for step in range(steps):
        ids = sequences(data, 8, 2 * step + 1)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 49:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    model.config.output_router_logits = False
    return model.eval()


def simulation(prepared: nn.Module, call: dict[str, Any]) -> qtk.QuantSim:
    config = load_config("weight_only_int4").model_dump(mode="json", exclude_none=True, exclude={"runtime"})
    config["defaults"]["weight"] |= {"dtype": "int3", "block_size": 128}
    sim = qtk.QuantSim(prepared, call, config=config)
    sim.compute_encodings(None, progress=False)
    return sim


def row(label: str, sim: qtk.QuantSim, model: nn.Module, calls: Sequence[dict[str, Any]]) -> None:
    found = qtk.divergence(sim, calls, progress=False).mean
    with torch.no_grad():
        pairs = [(model(**call).logits, sim.model(**call)["logits"]) for call in calls]
    signal, noise = (sum(float(each.square().sum()) for each in parts)
                     for parts in ([a for a, _ in pairs], [a - b for a, b in pairs]))
    print(f"| {label} | {1e6 * found:.0f} | {decibels(signal, noise):.2f} |", flush=True)


def gains(model: nn.Module, data: Tensor) -> None:
    def calls(count: int, seed: int) -> list[dict[str, Any]]:
        return [{"input_ids": each, "use_cache": False} for each in sequences(data, count, seed).split(12)]

    calibration, judged = calls(CALIBRATED, 101), calls(JUDGED, 100)
    separate = copy.deepcopy(model)
    for layer in separate.model.layers:  # type: ignore[union-attr]
        layer.mlp.experts = Separate(layer.mlp.experts)  # type: ignore[union-attr]
    pooled: dict[str, str] = {}
    print("\n| experts, method | KL × 10⁻⁶ | SQNR, dB |\n|---|---|---|")
    for form, own in (("stacked", model), ("separate", separate)):
        prepared = qtk.prepare_model(own, calibration[0], dynamic_shapes="all")
        row(f"{form}, rounded", simulation(prepared, judged[0]), own, judged)
        chain = ["seq_mse", "coordinate_descent"]
        for methods, options in (("gptq", None), ("gptq", ALL), (chain, None), (chain, ALL)):
            if form == "separate" and options is ALL:
                continue
            sim = simulation(prepared, judged[0])
            report = qtk.apply_layerwise(sim, calibration, methods, options=options or qtk.LayerwiseOptions(),
                                         progress=False)
            name = methods if isinstance(methods, str) else " + ".join(methods)
            row(f"{form}, {name}{', all tokens to all experts' if options else ''}", sim, own, judged)
            pooled.update(report.pooled)
    print("\npooled:", *(f"{weight} {text}" for weight, text in pooled.items()), sep="\n")


def families(names: Sequence[str]) -> None:
    print("\n|  | " + " | ".join(METHODS) + " |\n|---" + "|---" * len(METHODS) + "|")
    for name in names:
        model, example = causal(name)
        generator = torch.Generator().manual_seed(1)
        data = [{"input_ids": torch.randint(2, VOCABULARY, (16, 48), generator=generator), "use_cache": False}
                for _ in range(4)]
        prepared = qtk.prepare_model(model, {**example, "use_cache": False}, dynamic_shapes="all")
        print(f"| {name} | " + " | ".join(cell(prepared, data, method) for method in METHODS) + " |", flush=True)


def cell(prepared: Any, data: Sequence[dict[str, Any]], method: str) -> str:
    sim = qtk.QuantSim(prepared, data[0], config="weight_only_int4")
    sim.compute_encodings(None, progress=False)
    experts = [name for name in sim.quantizers if sim.quantizers[name].scale is not None
               and "expert" in name and sim.model.get_parameter(name).ndim == 3]
    try:
        report = qtk.apply_layerwise(sim, data, method, sites=experts, progress=False)
    except CalibrationError:
        return f"0 of {len(experts)}, no biases"
    better = sum(result.after < result.before for result in report.layers)
    left = f", left {', '.join(report.skipped)}" if report.skipped else ""
    return f"{better} of {len(experts)}{left}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--training-steps", type=int, default=400)
    parser.add_argument("--only", nargs="*", choices=FAMILIES, default=FAMILIES)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    if arguments.training_steps:
        data = standard_library()
        gains(trained(data, arguments.training_steps), data)
    if arguments.only:
        families(arguments.only)


if __name__ == "__main__":
    main()
