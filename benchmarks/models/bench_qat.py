"""What training through the simulation costs: time and memory, as multiples of the original model's training.

One step is forward and backward; the optimizer (SGD) is timed apart. Memory is what the graph of a forward pass keeps
for the backward pass, beside parameters. The ways: the original model; its W8A8 simulation (default target) with fixed
ranges, with batch norms that stay live, where it has any, and with learned ranges; the same graph with
``torch.fake_quantize_*`` in place of qtk's operator. Each also compiled by Inductor, unless ``--eager``. Turns are
interleaved: every figure is the median of ratios within a turn.

    python benchmarks/models/bench_qat.py
    python benchmarks/models/bench_qat.py --quick
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import timm
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))

from live_memory import live_bytes
from turns import commit

import qtk
from qtk.nn.tap import Tap
from qtk.quantizers.quantizer import Quantizer

MODELS, QUICK_MODELS = ("vit_small_patch16_224", "resnet50"), ("vit_tiny_patch16_224", "resnet18")
ORIGINAL = "original"
FIXED, LEARNED, TORCH = "qtk, fixed ranges", "qtk, learned ranges", "torch.fake_quantize_*"
LIVE = "qtk, fixed ranges, live batch norms"


class TorchFakeQuantize(Tap):
    """A quantizer with fixed range by torch's own operators."""

    idle = False

    def __init__(self, quantizer: Quantizer) -> None:
        super().__init__()
        encoding = quantizer.encoding
        assert encoding is not None
        spec = encoding.spec
        self.codes = int(spec.qmin), int(spec.qmax)
        self.axis = spec.granularity.axis if isinstance(spec.granularity, qtk.PerChannel) else None
        zero_point = torch.zeros_like(encoding.scale) if encoding.zero_point is None else encoding.zero_point
        self.register_buffer("scale", encoding.scale)
        self.register_buffer("zero_point", zero_point.to(torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        if self.axis is None:
            return torch.fake_quantize_per_tensor_affine(x, self.scale, self.zero_point, *self.codes)
        return torch.fake_quantize_per_channel_affine(x, self.scale, self.zero_point, self.axis % x.ndim, *self.codes)


def with_torchs_operator(model: nn.Module) -> nn.Module:
    """A copy of a simulation with every quantizer replaced."""
    model = copy.deepcopy(model)
    for path, module in list(model.named_modules()):
        if isinstance(module, Quantizer):
            parent, _, name = path.rpartition(".")
            model.get_submodule(parent)._modules[name] = TorchFakeQuantize(module)
    return model


def ways(name: str, batch_size: int, device: str) -> dict[str, nn.Module]:
    """The original model and its simulations, in train mode."""
    torch.manual_seed(0)
    original = timm.create_model(name).eval()
    x = torch.randn(2, *original.default_cfg["input_size"])
    unfolded = {"version": 1, "extends": "default", "fold_batch_norms": "at_export"}
    fixed, learned = qtk.QuantSim(original, x), qtk.QuantSim(original, x)
    live = qtk.QuantSim(original, x, config=unfolded)
    for sim in (fixed, learned, live):
        sim.compute_encodings([x], progress=False)
    learned.learn_ranges()
    models = {ORIGINAL: original, FIXED: fixed.model, LEARNED: learned.model, TORCH: with_torchs_operator(fixed.model)}
    if any(isinstance(module, nn.BatchNorm2d) for module in original.modules()):
        models = {ORIGINAL: original, LIVE: live.model, **models}
    return {way: model.to(device).train() for way, model in models.items()}


class Step:
    """One training step of a model."""

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        self.model, self.x = model, x
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        for _ in range(2):
            self.gradients()
            self.update()

    def gradients(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.x).square().mean().backward()

    def update(self) -> None:
        self.optimizer.step()

    def kept_bytes(self) -> int:
        """What the graph of one forward pass keeps."""
        self.optimizer.zero_grad()
        before = live_bytes(self.x.device.type)
        result = self.model(self.x).square().mean()
        after = live_bytes(self.x.device.type)
        del result
        return after - before


def seconds(run: Callable[[], None], device: str) -> float:
    start = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measured(steps: Mapping[str, Step], turns: int, device: str, label: str) -> dict[str, tuple[float, float, float]]:
    """Of each way: multiples of the first for gradients, update and kept bytes."""
    taken: dict[str, list[tuple[float, float]]] = {way: [] for way in steps}
    for _ in tqdm(range(turns), desc=label, unit="turn", leave=False):
        for way, step in steps.items():
            taken[way].append((seconds(step.gradients, device), seconds(step.update, device)))
    kept = {way: step.kept_bytes() for way, step in steps.items()}
    base = next(iter(steps))

    def ratio(way: str, index: int) -> float:
        return statistics.median(own[index] / other[index] for own, other in zip(taken[way], taken[base], strict=True))

    return {way: (ratio(way, 0), ratio(way, 1), kept[way] / kept[base]) for way in steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", help="timm names")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--turns", type=int)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--eager", action="store_true", help="nothing compiled")
    parser.add_argument("--quick", action="store_true", help="small models, few turns")
    arguments = parser.parse_args()
    turns = arguments.turns or (3 if arguments.quick else 9)
    table = Table(title=f"training, batch of {arguments.batch_size}: multiples of the original model's")
    for heading in ("model", "run", "way", "× forward + backward", "× optimizer step", "× kept bytes"):
        table.add_column(heading, justify="right" if "×" in heading else "left")
    for name in arguments.models or (QUICK_MODELS if arguments.quick else MODELS):
        models = ways(name, arguments.batch_size, arguments.device)
        x = torch.randn(arguments.batch_size, *models[ORIGINAL].default_cfg["input_size"], device=arguments.device)
        for run in ("eager",) if arguments.eager else ("eager", "compiled"):
            # modules keep a compiled forward of their own, so that eager turns come first
            callables = models if run == "eager" else {way: torch.compile(model) for way, model in models.items()}
            steps = {way: Step(model, x) for way, model in callables.items()}
            found = measured(steps, turns, arguments.device, f"{name}, {run}")
            for way, figures in found.items():
                table.add_row(name, run, way, *(f"{figure:.2f}" for figure in figures), end_section=way == TORCH)
    Console(width=140).print(table)
    print(f"commit {commit()}, torch {torch.__version__}, {arguments.device}, {torch.get_num_threads()} threads, "
          f"{qtk.backends()[arguments.device]}, {turns} turns")


if __name__ == "__main__":
    main()
