"""Safetensors files written, and read, tensor by tensor, so that no file is in memory as a whole."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import IO

import torch
from safetensors import safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

STATE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
LARGEST_BYTES = 5 * 10**9
"""Size of a shard, as ``huggingface_hub`` splits; a larger tensor has a shard of its own."""

AT_ONCE = 1 << 24
"""Bytes that are copied from file to file together."""


class Shards:
    """Shards of at most ``LARGEST_BYTES`` in the order of their tensors, with an index if there are several.

    In a shard tensors lie by the size of their elements, the largest first, so that all are aligned. Their bytes wait
    in temporary files, one for each size, until the shard is full.

    Args:
        folder: where to.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._waiting: dict[int, IO[bytes]] = {}  # by the size of an element
        self._headers: dict[int, dict[str, tuple[str, list[int], int]]] = {}
        self._files: list[tuple[Path, list[str]]] = []
        self._size = self._total = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Writes a tensor. Raises: OSError."""
        plain = tensor.detach().cpu().contiguous()
        size = plain.numel() * plain.element_size()
        if self._size and self._size + size > LARGEST_BYTES:
            self._end_shard()
        width = plain.element_size()
        if width not in self._waiting:
            self._waiting[width] = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115  closed with the shard
        if size:
            self._waiting[width].write(plain.flatten().view(torch.uint8).numpy().data)
        self._headers.setdefault(width, {})[name] = _name_of(plain.dtype), list(plain.shape), size
        self._size, self._total = self._size + size, self._total + size

    def end(self) -> None:
        """Names the shards, and writes the index. Raises: OSError."""
        if self._headers or not self._files:
            self._end_shard()
        if len(self._files) == 1:
            self._files[0][0].rename(self._folder / STATE_FILE)
            return
        weight_map: dict[str, str] = {}
        for number, (path, names) in enumerate(self._files, 1):
            file = f"model-{number:05d}-of-{len(self._files):05d}.safetensors"
            path.rename(self._folder / file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
        (self._folder / INDEX_FILE).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")

    def _end_shard(self) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        names, begin = list[str](), 0
        for width in sorted(self._headers, reverse=True):
            for name, (kind, shape, size) in self._headers[width].items():
                header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, begin + size]}
                names.append(name)
                begin += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        path = self._folder / f"{len(self._files)}.shard"
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for width in sorted(self._headers, reverse=True):
                with self._waiting[width] as waiting:
                    _append(waiting, file)
        self._files.append((path, names))
        self._waiting, self._headers, self._size = {}, {}, 0


def _append(waiting: IO[bytes], file: IO[bytes]) -> None:
    """Copies a file to the end of another, in the system where it can, in a quarter of the time. Raises: OSError."""
    size, begin = waiting.seek(0, os.SEEK_END), 0
    file.flush()
    with suppress(AttributeError, OSError):
        while begin < size and (copied := os.copy_file_range(waiting.fileno(), file.fileno(), size - begin, begin)):
            begin += copied
    waiting.seek(begin)
    file.seek(0, os.SEEK_END)
    shutil.copyfileobj(waiting, file, AT_ONCE)


@cache
def _name_of(dtype: torch.dtype) -> str:
    """Returns what safetensors calls a dtype, by its own header."""
    written = to_bytes({"x": torch.empty(0, dtype=dtype)})
    return str(json.loads(written[8:8 + int.from_bytes(written[:8], "little")])["x"]["dtype"])


def readers(folder: Path) -> dict[str, Callable[[], Tensor]]:
    """Name → what reads the tensor, of all shards. No file stays open: what was read of one counts as memory.

    Raises: OSError, SafetensorError or ValueError for files that are none.
    """
    files = [STATE_FILE]
    if (folder / INDEX_FILE).is_file():
        index = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))
        files = list(dict.fromkeys(index["weight_map"].values()))
    found: dict[str, Callable[[], Tensor]] = {}
    for path in (folder / file for file in files):
        with safe_open(path, framework="pt") as file:
            found |= {name: partial(_read, path, name) for name in list(file.keys())}
    return found


def _read(path: Path, name: str) -> Tensor:
    with safe_open(path, framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
        return tensor
