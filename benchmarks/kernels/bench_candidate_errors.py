"""Times a search over candidate ranges, in multiples of ``torch.Tensor.copy_`` of the same weight, and compares it
with the same search written in torch ops.

    python benchmarks/kernels/bench_candidate_errors.py --csv candidate_errors.csv
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from turns import Setting, Timed, arguments, finish, multiples

from qtk.numerics import candidate_errors as reference
from qtk.ops.candidate_errors import candidate_errors

CANDIDATES = 20
IN = 1536
GRANULARITIES = {"per tensor": (), "per row": (1, -1), "blocks of 64": (1, 64)}
CODES = (-8, 7)


def actions(x: torch.Tensor) -> dict[str, Callable[[], object]]:
    """The implementations to time on x [rows, IN], each checked against the reference first."""
    into = torch.empty_like(x)
    found: dict[str, Callable[[], object]] = {"copy_": lambda: into.copy_(x)}
    importance = torch.rand(1, x.shape[1], device=x.device)
    for name, block_size in GRANULARITIES.items():
        count = {(): 1, (1, -1): x.shape[0], (1, 64): x.numel() // 64}[block_size]
        fractions = torch.linspace(1 / CANDIDATES, 1, CANDIDATES, device=x.device)
        scales = (fractions[:, None] * (0.4 + 0.2 * torch.rand(count, device=x.device))).contiguous()
        spec = (x, scales, None, block_size, *CODES)
        for weights in (None, importance):
            own, expected = (of(*spec, importance=weights) for of in (candidate_errors, reference.candidate_errors))
            torch.testing.assert_close(own, expected, rtol=1e-5, atol=0)
        found |= {
            f"qtk, {name}": lambda spec=spec: candidate_errors(*spec),
            f"qtk, {name}, weighted": lambda spec=spec: candidate_errors(*spec, importance=importance),
            f"torch, {name}": lambda spec=spec: reference.candidate_errors(*spec),
        }
    return found


def main() -> None:
    given = arguments(__doc__, sizes={"cpu": (2.4,), "cuda": (2.4, 67)})
    found: list[Timed] = []
    for kind in given.kinds:
        for elements in given.elements:
            x = torch.randn(elements // IN, IN, device=given.device).to(getattr(torch, kind))
            found += multiples(actions(x), Setting(given.device, kind, "", elements, f"{CANDIDATES} candidates"), given)
    finish(found, given)


if __name__ == "__main__":
    main()
