"""Bytes that are in use, on a GPU or in the heap of this process."""

from __future__ import annotations

import ctypes
import gc

import torch


class _Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]


def live_bytes(device: str) -> int:
    """Of tensors on a GPU; on the CPU everything that the C library has handed out (Linux with glibc)."""
    gc.collect()
    if device == "cuda":
        return torch.cuda.memory_allocated()
    libc = ctypes.CDLL("libc.so.6")
    libc.mallinfo2.restype = _Mallinfo
    info = libc.mallinfo2()
    return int(info.uordblks + info.hblkhd)
