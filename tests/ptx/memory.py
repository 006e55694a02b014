"""Memory as a kernel sees it: host memory of the tensors that are alive, and shared memory of every program.

An access outside of a tensor, or a vector that is not aligned, is an error with the instruction that made it. Reads
may go on to the end of the last 16 bytes of a tensor's storage: a GPU's allocations are multiples of 512 bytes, and
``qtk.kernels.gpu.tiling.shifted`` relies on it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from tests.ptx.kinds import UNSIGNED, Bits

READABLE = 16
"""Storages may be read up to a multiple of this many bytes."""


class AccessError(AssertionError):
    """An access that a GPU would refuse, or that would read or destroy what belongs to another tensor."""


class GlobalMemory:
    """Storages of the tensors given, by address."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._given = tuple(tensors)
        sizes = dict(filter(None, map(_storage, self._given)))
        self._begins = np.array(sorted(sizes), np.uint64)
        self._sizes = np.array([sizes[int(begin)] for begin in self._begins], np.uint64)
        self._views: dict[int, NDArray[np.uint8]] = {}

    def read(self, addresses: NDArray[np.uint64], width: int) -> Bits:
        """Numbers of ``width`` bits at the addresses."""
        return self._each(addresses, width, None)

    def write(self, addresses: NDArray[np.uint64], values: Bits) -> None:
        self._each(addresses, values.dtype.itemsize * 8, values)

    def _each(self, addresses: NDArray[np.uint64], width: int, values: Bits | None) -> Bits:
        result = np.empty(len(addresses), UNSIGNED[width])
        owner = np.searchsorted(self._begins, addresses, side="right").astype(np.int64) - 1
        if bool((owner < 0).any()):
            raise AccessError(f"address {int(addresses[owner < 0][0]):#x} is of no tensor")
        offsets = addresses - self._begins[owner]
        sizes = self._sizes[owner]
        ends = sizes if values is not None else -(-sizes.astype(np.int64) // READABLE * READABLE).astype(np.uint64)
        beyond = offsets + np.uint64(width // 8) > ends
        if bool(beyond.any()):
            first = int(np.flatnonzero(beyond)[0])
            verb = "read" if values is None else "written"
            raise AccessError(f"byte {int(offsets[first])} is {verb} of a tensor of {int(sizes[first])}")
        for one in np.unique(owner):
            here = owner == one
            view, at = self._view(int(one)).view(UNSIGNED[width]), offsets[here] // np.uint64(width // 8)
            if values is None:
                result[here] = view[at]
            else:
                view[at] = values[here]
        return result

    def _view(self, owner: int) -> NDArray[np.uint8]:
        if owner not in self._views:
            size = -(-int(self._sizes[owner]) // READABLE) * READABLE
            raw = (ctypes.c_uint8 * size).from_address(int(self._begins[owner]))
            self._views[owner] = np.frombuffer(raw, np.uint8)
        return self._views[owner]


def _storage(value: object) -> tuple[int, int] | None:
    """Address and bytes of the storage of a dense tensor in host memory."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return None
    assert isinstance(value, torch.Tensor)
    if value.device.type != "cpu" or value.layout != torch.strided:
        return None
    try:
        storage = value.untyped_storage()
        return (storage.data_ptr(), storage.nbytes()) if storage.nbytes() else None
    except RuntimeError:  # what it had was taken away, as by a copy-on-write
        return None


class SharedMemory:
    """The shared memory of several programs; an address counts from the beginning of a program's own."""

    def __init__(self, programs: int, size: int) -> None:
        self._size = max(size, READABLE)
        self._bytes = np.full(programs * self._size, 0xA5, np.uint8)  # nothing that was not written makes sense

    def read(self, programs: NDArray[np.int64], addresses: NDArray[np.uint64], width: int) -> Bits:
        return self._bytes.view(UNSIGNED[width])[self._at(programs, addresses, width)]

    def write(self, programs: NDArray[np.int64], addresses: NDArray[np.uint64], values: Bits) -> None:
        width = values.dtype.itemsize * 8
        self._bytes.view(values.dtype)[self._at(programs, addresses, width)] = values

    def _at(self, programs: NDArray[np.int64], addresses: NDArray[np.uint64], width: int) -> NDArray[np.int64]:
        offsets = addresses.astype(np.int64)
        if bool((offsets + width // 8 > self._size).any()):
            raise AccessError(f"shared memory has {self._size} bytes; {int(offsets.max())} was accessed")
        return (programs * self._size + offsets) // (width // 8)
