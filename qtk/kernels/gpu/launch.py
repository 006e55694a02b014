"""Launches of Triton kernels, and what they need: options, the current device, the number of programs, counters."""

from __future__ import annotations

import contextlib
import functools
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

WAVES = 8
"""Programs per multiprocessor: enough to hide memory latency."""

EXACTLY = {"enable_fp_fusion": False}
"""How every kernel is compiled: a product is rounded before something is added to it, as on the CPU."""

MOST_KEPT = 4096
"""Different launches whose compiled kernels are kept at hand."""

_COMPILED: dict[tuple[object, ...], tuple[Any, tuple[object, ...]]] = {}
"""What distinguishes a launch → its compiled kernel, and the arguments that were compiled in."""

_TICKETS: dict[tuple[torch.device, int], Tensor] = {}


def run(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """As ``kernel[grid](*arguments, **constants)``, ``EXACTLY``; the first argument is a tensor on the current device.

    Before each launch Triton asks of every argument what a kernel is specialized for, which takes as long as the rest
    of a call. Here a launch with the same numbers, and with tensors of the same types that are aligned alike, takes the
    kernel that the first of them compiled. (For AMD's GPUs Triton also asks whether a storage has less than 2 GiB, for
    offsets of 32 bits; those of tensors of one size are the same.)
    """
    key = (
        id(kernel), arguments[0].get_device(), *constants, *constants.values(),
        *[(each.dtype, each.data_ptr() % 16) if isinstance(each, Tensor) else each for each in arguments],
    )
    known = _COMPILED.get(key)
    if known is not None:
        compiled, rest = known
        compiled[(*grid, 1, 1)[:3]](*arguments, *rest)
        return
    compiled = kernel[grid](*arguments, **constants, **EXACTLY)
    if compiled is None:  # Triton's interpreter
        return
    if len(_COMPILED) >= MOST_KEPT:
        _COMPILED.clear()
    _COMPILED[key] = compiled, tuple(constants[name] for name in kernel.arg_names[len(arguments) :])


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Makes the GPU of ``x`` the current device."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


@functools.cache
def programs(device: torch.device) -> int:
    """Target number of programs of a launch."""
    if device.type != "cuda":  # Triton's interpreter
        return 6
    return torch.cuda.get_device_properties(device).multi_processor_count * WAVES


def tickets(device: torch.device, count: int) -> Tensor:
    """At least ``count`` zeroed counters, one set per CUDA stream; a kernel must reset those it uses."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    kept = _TICKETS.get((device, stream))
    if kept is None or kept.numel() < count:
        kept = _TICKETS[device, stream] = torch.zeros(max(count, 4096), dtype=torch.int32, device=device)
    return kept
