"""Times one call on 1 MiB of float32 against launching a kernel that does nothing, in microseconds of the host.

Calls are queued one after the other and the GPU is waited for at the end, so that a figure is what limits a model of
many small tensors: the host's time for a call, or the GPU's if that is longer. Multiples of ``copy_`` of the same
tensor in the same turn; medians over the turns. On the CPU there is no launch, and the rest is timed.

    python benchmarks/kernels/bench_launch.py --csv launch.csv
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from turns import Setting, arguments, finish, multiples

from qtk.numerics import affine
from qtk.ops.fake_quantize import fake_quantize
from qtk.ops.statistics import min_max

MIB = (1 << 20) / 4 / 1e6  # million elements of float32
ROWS = 512
CODES = (-128, 127)


def empty_launch(x: torch.Tensor) -> dict[str, Callable[[], object]]:
    if not x.is_cuda:
        return {}
    import triton

    @triton.jit
    def nothing(x_at):
        pass

    return {"empty launch": lambda: nothing[(1,)](x)}


def actions(x: torch.Tensor) -> dict[str, Callable[[], object]]:
    """What is timed on x [rows, columns]. Raises: SystemExit if it is not what the reference computes."""
    into, zero = torch.empty_like(x), torch.zeros(1, dtype=torch.int32, device=x.device)
    scale, scales = torch.full((1,), 0.03, device=x.device), torch.full((len(x),), 0.03, device=x.device)
    for step, sizes in ((scale, ()), (scales, (1, -1))):
        expected = affine.fake_quantize(x, step, None, sizes, *CODES)
        if not torch.equal(fake_quantize(x, step, None, sizes, *CODES), expected):
            raise SystemExit("fake_quantize is not the reference; no speed is given")
    return {
        "copy_": lambda: into.copy_(x),
        **empty_launch(x),
        "qtk, per tensor": lambda: fake_quantize(x, scale, None, (), *CODES),
        "qtk, per row": lambda: fake_quantize(x, scales, None, (1, -1), *CODES),
        "qtk min_max, per tensor": lambda: min_max(x, ()),
        "torch builtin, per tensor": lambda: torch.fake_quantize_per_tensor_affine(x, scale, zero, *CODES),
    }


@torch.no_grad()
def main() -> None:
    given = arguments(__doc__, sizes={"cpu": (MIB,), "cuda": (MIB,)})
    x = torch.randn(ROWS, ROWS, device=given.device)  # 1 MiB, whatever --sizes says
    finish(multiples(actions(x), Setting(given.device, "float32", "", x.numel(), "one call"), given), given)


if __name__ == "__main__":
    main()
