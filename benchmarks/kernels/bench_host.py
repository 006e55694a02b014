"""Times what the host does for a call on a GPU that is not there: all of it but the driver's own launch.

Triton compiles for an H200; what its launcher would hand to the driver is dropped, so that nothing is computed. The
dispatch of the op is not in the figures, nor the driver's two to four microseconds, which every launch takes. Multiples
of a launch of an empty kernel by Triton in the same turn; medians over the turns.

    python benchmarks/kernels/bench_host.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch
import triton
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel

from qtk.kernels.gpu import fake_quantize, fake_quantize_dynamic
from qtk.kernels.gpu import statistics as ends

CALLS = 500
"""Of each way in a turn."""


@triton.jit
def nothing(x_at):
    pass


def without_gpu() -> None:
    """Triton compiles for an H200, and its launches end before the driver."""
    triton.runtime.driver.set_active(SimpleNamespace(
        get_current_device=lambda: 0, get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32), utils=SimpleNamespace(unload_module=lambda module: None),
    ))

    def load(self: CompiledKernel) -> None:
        self.module, self.function, self._run = 0, 0, lambda *arguments: None

    CompiledKernel._init_handles = load


def ways() -> dict[str, Callable[[], object]]:
    x, grad = torch.randn(512, 512), torch.randn(512, 512)
    scale, scales = torch.full((1,), 0.03), torch.full((512,), 0.03)
    codes = -128, 127
    return {
        "empty kernel": lambda: nothing[(1,)](x),
        "forward, per tensor": lambda: fake_quantize.fake_quantize(x, scale, None, (), *codes),
        "forward, per row": lambda: fake_quantize.fake_quantize(x, scales, None, (1, -1), *codes),
        "backward": lambda: fake_quantize.fake_quantize_backward(grad, x, scale, None, (), *codes, False, False),
        "backward, learned": lambda: fake_quantize.fake_quantize_backward(
            grad, x, scale, None, (), *codes, True, False),
        "dynamic, per row": lambda: fake_quantize_dynamic.fake_quantize_dynamic(x, (1, -1), *codes, True),
        "min_max": lambda: ends.min_max(x, (), 1),
    }


def seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - begin) / CALLS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=25)
    given = parser.parse_args()
    without_gpu()
    calls = ways()
    for call in calls.values():
        call()  # compiles
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in tqdm(range(given.repeats), unit="turn", leave=False):
        for name, call in calls.items():
            taken[name].append(seconds(call))
    table = Table(title="the host's time for a call", caption=f"Triton {triton.__version__}, torch {torch.__version__}")
    table.add_column("call")
    table.add_column("µs", justify="right")
    table.add_column("× empty kernel", justify="right")
    for name, own in taken.items():
        ratio = statistics.median(mine / empty for mine, empty in zip(own, taken["empty kernel"], strict=True))
        table.add_row(name, f"{statistics.median(own) * 1e6:.1f}", f"{ratio:.1f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
