"""Times min/max and histograms against torch's own, in multiples of ``torch.Tensor.copy_`` of the same tensor.

    python benchmarks/kernels/bench_statistics.py --csv statistics.csv
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from turns import Setting, Timed, arguments, finish, multiples

from qtk.ops.statistics import histogram, histogram_and_min_max, min_max

BINS = 512
SHORT = 32
"""Elements of a block."""


def actions(x: torch.Tensor) -> dict[str, Callable[[], object]]:
    """The implementations to time on x [rows, 1536]. Raises: SystemExit if results differ from torch's."""
    low, high = min_max(x, ())
    if (float(low), float(high)) != (float(x.min()), float(x.max())):
        raise SystemExit("min_max is not torch's; no speed is given")
    blocks = x.reshape(-1, SHORT)
    if not all(map(torch.equal, min_max(x, (1, SHORT)), torch.aminmax(blocks.float(), dim=1))):
        raise SystemExit("min_max of blocks is not torch's; no speed is given")
    power = torch.tensor([-6], dtype=torch.int32, device=x.device)  # randn: about ±5.5
    first = torch.full((1,), -BINS / 2, device=x.device)
    counts = histogram(x, first, power, BINS, ())
    if int(counts.sum()) != int((x.abs() < 4).sum()) + int((x == -4).sum()):
        raise SystemExit("the histogram does not count every element within ±4; no speed is given")
    into = torch.empty_like(x)
    channels = x.shape[-1]
    firsts, powers = first.expand(channels).contiguous(), power.expand(channels).contiguous()
    return {
        "copy_": lambda: into.copy_(x),
        "qtk min_max, per tensor": lambda: min_max(x, ()),
        "torch aminmax": lambda: torch.aminmax(x),
        "qtk min_max, per last axis": lambda: min_max(x, (-1, 1)),
        "qtk min_max, per row": lambda: min_max(x, (1, -1)),
        "torch amin and amax, per last axis": lambda: (x.amin(0), x.amax(0)),
        f"qtk min_max, blocks of {SHORT}": lambda: min_max(x, (1, SHORT)),
        f"torch aminmax, blocks of {SHORT}": lambda: torch.aminmax(blocks, dim=1),
        f"qtk histogram, {BINS} bins": lambda: histogram(x, first, power, BINS, ()),
        f"qtk histogram and min_max, {BINS} bins": lambda: histogram_and_min_max(x, first, power, BINS, ()),
        f"torch histc, {BINS} bins": lambda: torch.histc(x, BINS),
        f"qtk histogram, {BINS} bins, per last axis": lambda: histogram(x, firsts, powers, BINS, (-1, 1)),
    }


def main() -> None:
    given = arguments(__doc__, sizes={"cpu": (2.4, 64), "cuda": (2.4, 67, 268)})
    found: list[Timed] = []
    for kind in given.kinds:
        for elements in given.elements:
            x = torch.randn(elements // 1536, 1536, device=given.device).to(getattr(torch, kind))
            found += multiples(actions(x), Setting(given.device, kind, "", elements, "statistics"), given)
    finish(found, given)


if __name__ == "__main__":
    main()
