"""Stores the values of all batches between two layers: on their device, in host memory, or on disk."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, fx

from qtk.calls.calls import Call
from qtk.calls.inputs import input_leaves
from qtk.graph.captured_graph import CapturedGraph
from qtk.graph.written_buffers import read_values
from qtk.torch_private import pytree

Offload: TypeAlias = Literal["none", "cpu", "disk"]
"""Where values are kept: on their device, in host memory, or in files of a temporary directory."""

Values: TypeAlias = dict[fx.Node, tuple[Any, ...]]
"""Node → its values for one batch, one for each path; the same object where the paths agree."""


def start_values(graph: CapturedGraph, call: Call, paths: int) -> Values:
    """The inputs and states of a call, the same on so many paths."""
    leaves, inputs = input_leaves(graph.graph, call.args, call.kwargs), graph.graph.find_nodes(op="placeholder")
    given = {**dict(zip(inputs, leaves, strict=True)), **read_values(graph, call.buffers)}
    return {node: (value,) * paths for node, value in given.items()}


class LiveValues:
    """Stores the values of every batch until the walk continues with that batch.

    Args:
        offload: where to store them.
    """

    def __init__(self, offload: Offload = "none") -> None:
        self.offload = offload
        self._on_device: dict[int, Values] = {}
        self._packed: dict[int, _Packed] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="qtk-") if offload == "disk" else None

    def put(self, batch: int, values: Values) -> None:
        """Stores the values of a batch."""
        if self.offload == "none":
            self._on_device[batch] = values
            return
        packed = _pack(values)
        if self._folder is not None:
            save_file(packed.tensors, self._file(batch))
            packed.tensors = {}
        self._packed[batch] = packed

    def take(self, batch: int) -> Values:
        """Removes and returns the values of a batch, on their device."""
        values = self.read(batch)
        self._on_device.pop(batch, None)
        self._packed.pop(batch, None)
        return values

    def read(self, batch: int) -> Values:
        """Returns the values of a batch, on their device, and keeps them."""
        if self.offload == "none":
            return self._on_device[batch]
        packed = self._packed[batch]
        return packed.values(packed.tensors if self._folder is None else load_file(self._file(batch)))

    def close(self) -> None:
        """Deletes all values, and their files."""
        self._on_device.clear()
        self._packed.clear()
        if self._folder is not None:
            self._folder.cleanup()

    def _file(self, batch: int) -> Path:
        assert self._folder is not None
        return Path(self._folder.name, f"{batch}.safetensors")


@dataclass(slots=True)
class _Packed:
    """The values of a batch with every tensor once, by name, on the CPU."""

    nodes: list[fx.Node]
    leaves: list[Any]
    structure: pytree.TreeSpec
    tensors: dict[str, Tensor]

    def values(self, tensors: Mapping[str, Tensor]) -> Values:
        moved = {leaf: tensors[leaf.name].to(leaf.device) for leaf in self.leaves if isinstance(leaf, _Stored)}
        leaves = [moved[leaf] if isinstance(leaf, _Stored) else leaf for leaf in self.leaves]
        return dict(zip(self.nodes, pytree.tree_unflatten(leaves, self.structure), strict=True))


@dataclass(frozen=True, slots=True)
class _Stored:
    """A reference to a tensor stored by name."""

    name: str
    device: torch.device


def _pack(values: Values) -> _Packed:
    leaves, structure = pytree.tree_flatten(list(values.values()))
    names: dict[int, str] = {}
    tensors: dict[str, Tensor] = {}
    packed = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            packed.append(leaf)
            continue
        name = names.setdefault(id(leaf), str(len(names)))
        if name not in tensors:
            tensors[name] = leaf.detach().cpu().clone(memory_format=torch.contiguous_format)
        packed.append(_Stored(name, leaf.device))
    return _Packed(list(values), packed, structure, tensors)
