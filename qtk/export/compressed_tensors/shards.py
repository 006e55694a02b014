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

ALIGNED = 8
"""Bytes of the largest element: tensors of a multiple of them leave the next one aligned."""

SHARD = 2 * ALIGNED
"""Stands for the shard itself among the sizes of elements whose tensors wait: it comes before all of them."""

ROOM, ROOM_OF_ONE, MOST_ROOM = 1 << 10, 192, 1 << 20
"""Bytes that are left for the header of a shard, more for each tensor, and at most: readers parse all of them."""


class Shards:
    """Shards of at most ``LARGEST_BYTES`` in the order of their tensors, with an index if there are several.

    All tensors are aligned: they lie as they come behind the room that is left for the header, but tensors that would
    shift the next ones wait in temporary files, one for each size of an element, and come last, the largest first.

    Args:
        folder: where to.
        num_tensors: how many there will be, about; where the header takes more room, the shard is written twice.
    """

    def __init__(self, folder: Path, num_tensors: int = 0) -> None:
        self._folder, self._room = folder, min(ROOM + ROOM_OF_ONE * num_tensors, MOST_ROOM)
        self._open: dict[int, IO[bytes]] = {}  # by the size of an element, or ``SHARD``
        self._headers: dict[int, dict[str, tuple[str, list[int], int]]] = {}
        self._files: list[tuple[Path, list[str]]] = []
        self._size = self._total = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Writes a tensor. Raises: OSError."""
        plain = tensor.detach().cpu().contiguous()
        size = plain.numel() * plain.element_size()
        if self._size and self._size + size > LARGEST_BYTES:
            self._end_shard()
        place = plain.element_size() if size % ALIGNED else SHARD
        file = self._file(place)
        if size:
            file.write(plain.flatten().view(torch.uint8).numpy().data)
        self._headers.setdefault(place, {})[name] = _name_of(plain.dtype), list(plain.shape), size
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

    def _file(self, place: int) -> IO[bytes]:
        if place not in self._open:
            if place != SHARD:
                self._open[place] = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115  closed with the shard
            else:
                self._open[place] = self._path().open("w+b")
                self._open[place].seek(self._room)
        return self._open[place]

    def _path(self) -> Path:
        return self._folder / f"{len(self._files)}.shard"

    def _end_shard(self) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        names, begin = list[str](), 0
        for place in sorted(self._headers, reverse=True):
            for name, (kind, shape, size) in self._headers[place].items():
                header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, begin + size]}
                names.append(name)
                begin += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text = text.ljust(self._room - ALIGNED) if len(text) <= self._room - ALIGNED else text + b" " * (-len(text) % 8)
        path = self._path()
        with self._file(SHARD) as shard:
            file = shard
            if ALIGNED + len(text) > self._room:
                path = path.with_suffix(".second")
                file = path.open("w+b")
            with file:
                file.seek(0)
                file.write(len(text).to_bytes(8, "little") + text)
                if file is not shard:
                    _append(shard, file, self._room)
                for place in sorted(self._open.keys() - {SHARD}, reverse=True):
                    with self._open[place] as waiting:
                        _append(waiting, file)
        if file is not shard:
            self._path().unlink()
        self._files.append((path, names))
        self._open, self._headers, self._size = {}, {}, 0


def _append(waiting: IO[bytes], file: IO[bytes], begin: int = 0) -> None:
    """Copies a file, or what lies behind its first bytes, to the end of another: in the system, in a quarter of the
    time.

    Raises: OSError.
    """
    size = waiting.seek(0, os.SEEK_END)
    file.seek(0, os.SEEK_END)
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
