"""Weights whose memory is a range of a file: read where they are used, and dropped from memory again.

``safetensors``, and ``from_pretrained`` of transformers by it, map files: the system reads a page of a weight when
something reads the weight. A page that nobody has written can be dropped at any time, and is read again from the file.
A weight that is written gets memory of its own, page by page, and never reaches the file; ``rewrite`` puts new values
into another file instead. All this needs Linux; elsewhere no weight counts as mapped.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import tempfile
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

LIMIT_BYTES = 1 << 28
"""Bytes of files that ``bounded`` leaves in memory."""

LOOK_S = 2e-4
"""Time between two looks: a few MB are read in it."""

LARGE_BYTES = 10**9
"""Size of the parameters from which on a run says what it will take before it begins."""

PAGE = mmap.PAGESIZE
DONTNEED = 4  # of <sys/mman.h> on Linux

MMAP_THRESHOLD = -3  # of <malloc.h> of glibc
HEAP_BYTES, USUAL_HEAP_BYTES = 1 << 21, 1 << 25
"""Largest block of memory that comes from the heap while ``bounded`` runs, and otherwise. Free blocks of the heap below
one in use stay in memory. The larger bound is what glibc raises its own to, once such blocks were freed."""
OF_FILE = 1 << 61
"""The bit of /proc/self/pagemap for a page that belongs to a file: one that was not written. In memory: bit 63."""


def is_mapped(tensor: Tensor) -> bool:
    """Says whether the memory of a tensor, of at least a page, is a private range of a file."""
    return tensor.numel() * tensor.element_size() >= PAGE and bool(_mapped([tensor]))


def is_large(model: nn.Module) -> bool:
    """Says whether the parameters take so much that a run on them is long."""
    return parameter_bytes(model) >= LARGE_BYTES


def parameter_bytes(model: nn.Module) -> int:
    return sum(each.numel() * each.element_size() for each in model.parameters())


def has_mapped(model: nn.Module) -> bool:
    """Says whether any parameter is mapped."""
    return bool(_mapped(model.parameters()))


def readable_bytes(model: nn.Module) -> int:
    """Bytes of mapped parameters that a run may add to memory: what is not there yet, up to what ``bounded`` leaves."""
    size_bytes = there = 0
    for begin, end in {_range(each) for each in _mapped(model.parameters())}:
        pages = _page_entries(begin, end)
        size_bytes += end - begin
        there += 0 if pages is None else min(PAGE * int((pages < 0).sum()), end - begin)
    return max(0, min(LIMIT_BYTES, size_bytes) - there)


@torch.no_grad()
def rewrite(parameter: Tensor, value: Tensor) -> None:
    """Changes ``parameter``: a mapped one gets the memory of a mapped ``value``, else of a new file, any other a copy.

    What it held before is unchanged in its file. The new file has no name, lies where ``TMPDIR`` says, and ends with
    the tensors in it; where it cannot be written, the value is in memory.
    """
    if not isinstance(parameter, nn.Parameter) or not is_mapped(parameter):
        parameter.copy_(value)
        return
    value, before = value.detach().to(parameter), parameter.detach()
    try:
        parameter.data = value if is_mapped(value) else _in_file(value)
    except (OSError, SafetensorError):
        parameter.data = value.clone()
    if not _has_written_pages(before):
        _drop([_range(before)])
    return_free_memory()


def _in_file(value: Tensor) -> Tensor:
    descriptor, name = tempfile.mkstemp(prefix="qtk-", suffix=".safetensors")
    os.close(descriptor)
    try:
        save_file({"value": value.contiguous()}, name)
        return load_file(name)["value"]
    finally:
        Path(name).unlink()


@contextmanager
def bounded(*models: nn.Module, limit_bytes: int | None = None) -> Iterator[None]:
    """Drops mapped weights of the models while the body runs, whenever they take more than ``limit_bytes``.

    Weights that were written since they were loaded stay.
    """
    limit_bytes = LIMIT_BYTES if limit_bytes is None else limit_bytes
    parameters = [each for model in models for each in model.parameters()]
    size_bytes = sum(each.numel() * each.element_size() for each in parameters)
    pages = _Pages(parameters) if size_bytes > limit_bytes else None  # to look at mappings takes milliseconds
    if not pages:
        yield
        return
    with _Bounded(pages, limit_bytes), _SmallHeap():
        yield
    pages.drop()


class _Bounded(TorchFunctionMode):
    """Looks at the memory after every function of torch, unless it has just looked."""

    def __init__(self, pages: _Pages, limit_bytes: int) -> None:
        super().__init__()
        self._pages, self._limit, self._due = pages, limit_bytes, 0.0
        pages.drop()
        self._least = pages.resident_bytes()

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if (now := time.perf_counter()) < self._due:
            return result
        if self._pages.resident_bytes() - self._least > self._limit:
            self._pages.drop()
            self._least = self._pages.resident_bytes()  # of other files
        self._due = now + LOOK_S
        return result


class _SmallHeap:
    """Large blocks of memory go back to the system once they are free, in the outermost of nested ones."""

    _entered, _lock = 0, threading.Lock()

    def __enter__(self) -> None:
        self._enter(1)

    def __exit__(self, *_: object) -> None:
        self._enter(-1)

    @classmethod
    def _enter(cls, change: int) -> None:
        with cls._lock, suppress(AttributeError):  # of another C library
            cls._entered += change
            bound = HEAP_BYTES if cls._entered else USUAL_HEAP_BYTES
            ctypes.CDLL(None).mallopt(ctypes.c_int(MMAP_THRESHOLD), ctypes.c_int(bound))


@dataclass(slots=True)
class _Unwritten:
    """A mapped tensor none of whose pages was written when it had this address and version."""

    tensor: Tensor
    address: int
    version: int


class _Pages:
    """The pages of mapped tensors that nobody has written."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._known = _unwritten(tensors)
        self._memory = os.open("/proc/self/statm", os.O_RDONLY) if self._known else -1

    def __bool__(self) -> bool:
        return bool(self._known)

    def __del__(self) -> None:
        if self._memory >= 0:
            os.close(self._memory)

    def resident_bytes(self) -> int:
        """Bytes of files in memory, libraries too."""
        return int(os.pread(self._memory, 128, 0).split()[2]) * PAGE

    def drop(self) -> None:
        """Drops these pages from memory, except of tensors written since; of a tensor that moved, the new pages."""
        moved = [each.tensor for each in self._known if each.tensor.data_ptr() != each.address]
        self._known = [each for each in self._known if each.tensor.data_ptr() == each.address
                       and each.tensor._version == each.version]
        self._known += _unwritten(moved) if moved else []
        _drop(_range(each.tensor) for each in self._known)
        return_free_memory()


def return_free_memory() -> None:
    """Gives memory that is free inside the heap back to the system: glibc keeps what lies below anything in use."""
    with suppress(AttributeError):  # of another C library
        ctypes.CDLL(None).malloc_trim(0)


def _unwritten(tensors: Iterable[Tensor]) -> list[_Unwritten]:
    return [_Unwritten(each, each.data_ptr(), each._version) for each in _mapped(tensors)
            if not _has_written_pages(each)]


def _drop(ranges: Iterable[tuple[int, int]]) -> None:
    """Drops the pages that lie in these ranges as a whole, or in several that touch each other."""
    joined: list[list[int]] = []
    for begin, end in sorted(set(ranges)):
        if joined and begin <= joined[-1][1]:
            joined[-1][1] = max(end, joined[-1][1])
        else:
            joined.append([begin, end])
    for begin, end in joined:
        first, last = -(-begin // PAGE) * PAGE, end // PAGE * PAGE
        if last > first:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), DONTNEED)


def _mapped(tensors: Iterable[Tensor]) -> list[Tensor]:
    perhaps = [each for each in tensors if each.device.type == "cpu" and each.numel()
               and not each.untyped_storage().resizable()]  # memory that torch allocated can be resized
    ranges = _file_ranges() if perhaps else []
    return [each for each in perhaps if _is_inside(each, ranges)]


def _range(tensor: Tensor) -> tuple[int, int]:
    begin = tensor.data_ptr()
    return begin, begin + tensor.numel() * tensor.element_size()


def _is_inside(tensor: Tensor, ranges: list[tuple[int, int]]) -> bool:
    begin, end = _range(tensor)
    index = bisect_right(ranges, (begin, sys.maxsize)) - 1
    return tensor.is_contiguous() and index >= 0 and end <= ranges[index][1]


def _file_ranges() -> list[tuple[int, int]]:
    """Addresses of private mappings of files that can be written, in order; none where the system does not say."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    ranges = []
    for line in lines:
        if " rw-p " not in line or ".so" in line:  # of thousands of lines few are taken apart
            continue
        addresses, _, _, _, inode, *_ = line.split()
        if inode != "0":
            begin, _, end = addresses.partition("-")
            ranges.append((int(begin, 16), int(end, 16)))
    return sorted(ranges)


def _has_written_pages(tensor: Tensor) -> bool:
    """Says whether a page of a mapped tensor was written; also where the system does not say."""
    pages = _page_entries(*_range(tensor))
    return pages is None or bool(((pages != 0) & (pages & OF_FILE == 0)).any())


def _page_entries(begin: int, end: int) -> Tensor | None:
    """Reads what the system says of each page of a range; ``None`` where it says nothing. Shape: [pages]."""
    first, count = begin // PAGE, -(-end // PAGE) - begin // PAGE
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as file:
            file.seek(8 * first)
            return torch.frombuffer(bytearray(file.read(8 * count)), dtype=torch.int64)
    except (OSError, ValueError):
        return None
