"""What a launch of a Triton kernel needs: options, the current device, the number of programs, zeroed counters."""

from __future__ import annotations

import contextlib
import functools
from contextlib import AbstractContextManager

import torch
from torch import Tensor

WAVES = 8
"""Programs per multiprocessor: enough to hide memory latency."""

EXACTLY = {"enable_fp_fusion": False}
"""How every kernel is compiled: a product is rounded before something is added to it, as on the CPU."""

_TICKETS: dict[tuple[torch.device, int], Tensor] = {}


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
