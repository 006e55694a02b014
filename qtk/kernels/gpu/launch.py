"""What every launch of a Triton kernel needs from the device."""

from __future__ import annotations

import contextlib
import functools
from contextlib import AbstractContextManager

import torch
from torch import Tensor

WAVES = 8
"""Programs a multiprocessor is given: enough to hide the latency of memory."""

_TICKETS: dict[tuple[torch.device, int], Tensor] = {}


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Launches go to the GPU of ``x``, whichever is current."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


@functools.cache
def programs(device: torch.device) -> int:
    """About how many programs a grid should have."""
    if device.type != "cuda":  # Triton's interpreter
        return 6
    return torch.cuda.get_device_properties(device).multi_processor_count * WAVES


def tickets(device: torch.device, count: int) -> Tensor:
    """``count`` counters that are 0; a kernel leaves them so. One set a stream: two kernels never share them."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    kept = _TICKETS.get((device, stream))
    if kept is None or kept.numel() < count:
        kept = _TICKETS[device, stream] = torch.zeros(max(count, 4096), dtype=torch.int32, device=device)
    return kept
