"""How many operators that compute a forward dispatches: of the original model, and of its W8A8 simulation.

On a GPU each of them is a launch: a quantizer is one ``qtk`` operator, and that is one Triton kernel, whatever its
granularity. Views and allocations launch nothing and are not counted; nor are the weights, quantized once
and kept. The counts do not depend on the device.

    python benchmarks/models/bench_launches.py
    python benchmarks/models/bench_launches.py --models resnet18 --batch-size 1
"""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

import timm
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import qtk

MODELS = ("vit_small_patch16_224", "resnet50")
NOT_LAUNCHED = ("aten::empty", "aten::detach", "aten::alias", "aten::_unsafe_view")


class Counting(TorchDispatchMode):
    """Counts the operators that compute something, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if not func.is_view and not name.startswith(NOT_LAUNCHED):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def operators(model: nn.Module, x: Tensor) -> Counter[str]:
    with Counting() as counting:
        model(x)
    return counting.counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, help="timm names")
    parser.add_argument("--batch-size", type=int, default=1)
    arguments = parser.parse_args()
    table = Table(title="operators a forward dispatches, views left out")
    for heading in ("model", "original", "simulated", "of these qtk", "sites of activations"):
        table.add_column(heading, justify="left" if heading == "model" else "right", overflow="fold")
    for name in arguments.models:
        model = timm.create_model(name).eval()
        x = torch.randn(arguments.batch_size, *model.default_cfg["input_size"])
        sim = qtk.QuantSim(model, x)
        sim.compute_encodings([x], progress=False)
        original, simulated = operators(model, x), operators(sim.model, x)
        own = sum(count for operator, count in simulated.items() if operator.startswith("qtk::"))
        kept = sum(quantizer.cache for quantizer in sim.quantizers.values())  # whoever counts is shown them again
        counts = (original.total(), simulated.total() - kept, own - kept, len(sim.quantizers) - kept)
        table.add_row(name, *map(str, counts))
    Console().print(table)


if __name__ == "__main__":
    main()
