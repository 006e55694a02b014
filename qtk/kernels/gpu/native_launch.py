"""Launches that the C++ library makes by itself from then on: by CUDA's driver, without Python (csrc/launches.cpp)."""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qtk.kernels.gpu.launch import Repeatable

MOST_PARAMETERS = 64

_KEPT: dict[int, Any] = {}
"""The compiled kernels that C++ launches, which must not be unloaded."""


class Role(enum.IntEnum):
    """What a parameter of a kernel is: a tensor of the call, a number, or a null pointer."""

    INPUT, RESULT, SCALE, ZERO_POINT, INT32, INT64, FLOAT32, NOTHING = range(8)


NUMBERS = {"i32": Role.INT32, "u32": Role.INT32, "i64": Role.INT64, "u64": Role.INT64, "fp32": Role.FLOAT32}


def hand_over(
    launch: Repeatable, x: Tensor, scale: Tensor, zero_point: Tensor | None, block_size: Sequence[int], qmin: int,
    qmax: int,
) -> bool:
    """Has calls of ``qtk::fake_quantize`` like this one launch ``launch`` without Python. Returns: whether they will.

    ``launch`` is one of tensors with the first four roles, in their order; the rest are the arguments of the call.
    """
    if type(x) not in (Tensor, nn.Parameter) or not x.is_cuda or torch.version.cuda is None:
        return False
    found = parameters(launch)
    metadata = launch.compiled.metadata
    if found is None or needs_more(metadata):
        return False
    kept: bool = torch.ops.qtk.keep_launch(
        x, scale, zero_point, list(block_size), qmin, qmax, launch.compiled.function, list(launch.grid),
        32 * metadata.num_warps, metadata.shared, [role for role, _ in found], [value for _, value in found],
    )
    if kept:
        _KEPT[id(launch.compiled)] = launch.compiled
    return kept


def needs_more(metadata: Any) -> bool:
    """Whether a kernel is launched with more than a grid, threads and shared memory."""
    return metadata.num_ctas != 1 or any(
        getattr(metadata, name, 0) for name in
        ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl",
         "instrumentation_mode"))


def parameters(launch: Repeatable) -> list[tuple[Role, int]] | None:
    """Role and value, of a number its bits, of each parameter of the compiled kernel; ``None`` if one has no role.

    Parameters are the arguments that were not compiled in, and two pointers to scratch memory.
    """
    places = dict(launch.places)
    found: list[tuple[Role, int]] = []
    for at, (kind, value) in enumerate(zip(launch.compiled.src.signature.values(), launch.arguments, strict=True)):
        if kind == "constexpr":
            continue
        if at in places:
            found.append((Role(places[at]), 0))
        elif kind in NUMBERS:
            role = NUMBERS[kind]
            bits = struct.unpack("<I", struct.pack("<f", value))[0] if role is Role.FLOAT32 else value
            found.append((role, bits))
        else:
            return None
    found += [(Role.NOTHING, 0)] * 2
    return found if len(found) <= MOST_PARAMETERS else None
