"""Launches of the kernels that any tile serves: with the tile of the tiling, or with the fastest one found by timing.

Where ``QTK_TUNE_TRITON=1``, ``triton.autotune`` times the tiles of ``candidates`` on the first call of each key, which
waits for the GPU, and keeps the fastest; on disk, in Triton's cache, too. The key: ``KEY``, the sizes of the tensor and
what is compiled in, and the dtypes of all tensors. No bit changes, for nothing is summed: what is summed, in an order
that depends on the tile, is never tuned.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import triton
from torch import Tensor

from qtk.kernels.backends import tunes
from qtk.kernels.gpu.launch import EXACTLY, Call, on_device_of, programs, run_for
from qtk.kernels.gpu.tiles import arguments, has_tail, shape
from qtk.kernels.gpu.tiling import Tiling, tile_of

KEY = (
    "s1", "middle", "s2", "inner", "ASYMMETRIC", "SYMMETRIC", "MANTISSA", "SMALLEST", "RESIDUAL", "COLUMNS", "FLAT",
    "SHIFT", "TAIL",
)
"""Names of arguments of the kernels; those that a kernel has."""

TILES, WARPS = (2048, 4096, 8192), (4, 8)
"""Elements of a tile, and warps of a program."""


def launch(
    kernel: Any, x: Tensor, tiling: Tiling, given: Sequence[object], constants: Mapping[str, object],
    call: Call | None = None,
) -> None:
    """Launches ``kernel`` on all tiles of ``x``.

    ``given`` are its arguments before those of the tiling, ``constants`` its ``tl.constexpr`` arguments but the shape
    of the tile, ``call`` what it is kept for (``launch.run_for``); where tiles are timed, nothing is kept.
    """
    constants = {**constants, "TAIL": has_tail(tiling)}
    *sizes, _ = arguments(tiling)
    with on_device_of(x):
        if tunes(x.device):
            kernel = with_fastest_tile(kernel)
            flags = {"COLUMNS": tiling.columns, "FLAT": tiling.flat, "SHIFT": tiling.shift}
            kernel[functools.partial(_grid, x, tiling)](*given, *sizes, **constants, **flags, **EXACTLY)
            return
        splits = tiling.splits(programs(x.device))
        run_for(
            call, kernel, (tiling.groups * splits,), *given, *sizes, tiling.turns, splits, **constants, **shape(tiling)
        )


@functools.cache
def with_fastest_tile(kernel: Any, do_bench: Any = None) -> Any:
    """``kernel``, whose tile and warps are chosen by timing: by ``do_bench`` in place of Triton's own."""
    key = [name for name in KEY if name in kernel.arg_names]
    counted = triton.heuristics({"turns": _turns, "splits": _splits})(kernel)
    templates = [triton.Config({}, num_warps=warps) for warps in WARPS]  # of which candidates make others
    tune = triton.autotune(
        templates, key, prune_configs_by={"early_config_prune": candidates}, do_bench=do_bench, cache_results=True
    )
    return tune(counted)


def candidates(configs: Sequence[object], named: Mapping[str, Any], **constants: Any) -> list[triton.Config]:
    """The tiles that are timed for the arguments of a launch; at least one, each once."""
    given = {**named, **constants}
    sizes = given["s2"], given["middle"], given["inner"] + max(given["SHIFT"] - 1, 0), given["COLUMNS"]
    tiles = dict.fromkeys(tile_of(*sizes, elements) for elements in TILES)
    return [
        triton.Config({"SCALES": scales, "REACH": reach}, num_warps=warps) for scales, reach in tiles for warps in WARPS
    ]


def _tiling(named: Mapping[str, Any]) -> Tiling:
    s1, middle, s2, inner = (named[name] for name in ("s1", "middle", "s2", "inner"))
    outer = named["x_at"].numel() // (s1 * middle * s2 * inner)
    return Tiling(
        outer, s1, middle, s2, inner, named["step1"], named["step2"], named["COLUMNS"], named["SCALES"], named["REACH"],
        named["SHIFT"],
    )


def _turns(named: Mapping[str, Any]) -> int:
    return _tiling(named).turns


def _splits(named: Mapping[str, Any]) -> int:
    return _tiling(named).splits(programs(named["x_at"].device))


def _grid(x: Tensor, tiling: Tiling, named: Mapping[str, Any]) -> tuple[int]:
    """For a tile that was chosen; the interpreter wraps numbers."""
    scales, reach = (getattr(named[name], "value", named[name]) for name in ("SCALES", "REACH"))
    chosen = replace(tiling, scales_a_tile=scales, reach=reach)
    return (chosen.groups * chosen.splits(programs(x.device)),)
