"""An exported program in a runtime that compiles it: its inputs and outputs by name, and how it is called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from qtk.errors import ExportError, first_line
from qtk.torch_private import load_decomposed_ops, pytree


class ProgramInputs:
    """A ``.pt2`` file, and the names and order of what it takes and returns.

    Args:
        file: the file.

    Raises: ExportError if it is no exported program.
    """

    def __init__(self, file: Path) -> None:
        load_decomposed_ops()
        try:
            self.program: ExportedProgram = torch.export.load(file)
        except Exception as error:
            raise ExportError(f"cannot read {file} as an exported program: {first_line(error)}") from error
        values = {node.name: node.meta.get("val") for node in self.program.graph.find_nodes(op="placeholder")}
        self.names = [name for name in self.program.graph_signature.user_inputs
                      if isinstance(name, str) and isinstance(values.get(name), Tensor)]
        count = len(self.program.graph_signature.user_outputs)
        self.outputs = ["output"] if count == 1 else [f"output_{index}" for index in range(count)]

    def call(self, inputs: Mapping[str, Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the program, nested as it takes them. Raises: KeyError if one is missing."""
        leaves = [inputs[name].detach().cpu() for name in self.names]
        args, kwargs = pytree.tree_unflatten(leaves, self.program.call_spec.in_spec)
        return args, kwargs

    def by_name(self, result: object) -> dict[str, Tensor]:
        """The outputs by name, each with a first axis of one call."""
        tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        return {name: value.detach().clone().unsqueeze(0) for name, value in zip(self.outputs, tensors, strict=True)}


class LoadedProgram:
    """What every runtime of exported programs says of a file."""

    _program: ProgramInputs

    @property
    def inputs(self) -> Sequence[str]:
        return self._program.names

    @property
    def outputs(self) -> Sequence[str]:
        return self._program.outputs
