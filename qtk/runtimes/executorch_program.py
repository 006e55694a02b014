"""Lowers exported programs for ExecuTorch's XNNPACK delegate, and runs them in its runtime."""

from __future__ import annotations

import importlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from qtk.capture.torch_export import silent_torch
from qtk.errors import ExportError, first_line
from qtk.report.runtime_nodes import FloatNode, RuntimeNodes
from qtk.runtimes.program_inputs import LoadedProgram, ProgramInputs
from qtk.torch_private import pytree

LAYERS = ("convolution", "linear", "addmm", "mm", "bmm")


class ExecuTorchProgram(LoadedProgram):
    """A ``.pt2`` file, lowered and loaded.

    Args:
        file: the file.
        reasons: name of a site that is not quantized → why.
        threads: threads of a run; 0 leaves the number to ExecuTorch.

    Raises: ExportError if ExecuTorch is not installed, or does not lower or load the program.
    """

    sites: Sequence[str] = ()

    def __init__(self, file: Path, reasons: Mapping[str, str], *, threads: int = 0) -> None:
        try:
            from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
            from executorch.exir import to_edge_transform_and_lower
            from executorch.extension.pybindings.portable_lib import _unsafe_reset_threadpool
            from executorch.runtime import Runtime

            importlib.import_module("executorch.kernels.quantized")  # the ops outside of the delegate
        except ImportError as error:
            raise ExportError(f"running a program in ExecuTorch needs the package {error.name}; "
                              "pip install 'qtk[executorch]'") from error
        self.runtime = f"ExecuTorch {version('executorch')}, XNNPACK"
        self._program = ProgramInputs(file)
        try:
            with silent_torch(), _silent_logs():
                if threads:
                    _unsafe_reset_threadpool(threads)
                edge = to_edge_transform_and_lower(self._program.program, partitioner=[XnnpackPartitioner()])
                self._nodes = _nodes(edge.exported_program().graph_module)
                self._buffer = edge.to_executorch().buffer  # the method reads it as long as it runs
                self._method: Any = Runtime.get().load_program(self._buffer).load_method("forward")
        except Exception as error:  # whatever its passes say
            raise ExportError(f"{file}: {self.runtime} does not lower it: {first_line(error)}") from error
        self.size_bytes = len(self._buffer)

    def run(self, inputs: Mapping[str, Tensor], *, sites: bool = False) -> dict[str, Tensor]:
        returned = [self._program.by_name(self._method.execute(leaves)) for leaves in self._calls(inputs)]
        return {name: torch.cat([each[name] for each in returned]) for name in self.outputs}

    def timed(self, inputs: Mapping[str, Tensor]) -> Callable[[], object]:
        calls = self._calls(inputs)
        return lambda: [self._method.execute(leaves) for leaves in calls]

    def _calls(self, inputs: Mapping[str, Tensor]) -> list[list[Tensor]]:
        """The inputs as they are, or a call for each row where they have more than the memory that was planned for."""
        leaves = pytree.tree_leaves(self._program.call(inputs))
        longest = [leaf.shape for leaf in pytree.tree_leaves(self._program.program.example_inputs)]
        over = [next((axis for axis, length in enumerate(leaf.shape) if length > shape[axis]), None)
                for leaf, shape in zip(leaves, longest, strict=True)]
        lengths = [leaf.shape[axis] for leaf, axis in zip(leaves, over, strict=True) if axis is not None]
        rows = max(lengths, default=None)
        if rows is None:
            return [leaves]
        return [[leaf if axis is None else leaf.narrow(axis, row, 1) for leaf, axis in zip(leaves, over, strict=True)]
                for row in range(rows)]

    def nodes(self) -> RuntimeNodes:
        """Convolutions and products of the delegate, in integers or in float, and of the rest."""
        return self._nodes


@contextmanager
def _silent_logs() -> Iterator[None]:
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(level)


def _nodes(graph: fx.GraphModule) -> RuntimeNodes:
    from executorch.exir.lowered_backend_module import get_lowered_submodules

    integer: Counter[str] = Counter()
    floats = [FloatNode(_kind(node), node.name, "not delegated", True) for node in graph.graph.nodes if is_layer(node)]
    for _, lowered, _ in get_lowered_submodules(graph):
        for node in filter(is_layer, lowered.original_module.graph.nodes):
            if is_integer(node):
                integer[_kind(node)] += 1
            else:
                floats.append(FloatNode(_kind(node), node.name, "delegated in float", True))
    return RuntimeNodes(dict(integer), tuple(floats))


def _kind(node: fx.Node) -> str:
    return next(kind for kind in LAYERS if f"aten.{kind}.default" in str(node.target))


def is_layer(node: fx.Node) -> bool:
    """Says whether a node of ExecuTorch's edge dialect is a convolution or a matrix product."""
    return any(f"aten.{kind}.default" in str(node.target) for kind in LAYERS)


def is_integer(node: fx.Node) -> bool:
    """Says whether XNNPACK gets a layer as dequantize → layer → (rectifier) → quantize."""
    reader = next(iter(node.users)) if len(node.users) == 1 else None
    if reader is not None and any(f"aten.{kind}.default" in str(reader.target) for kind in ("relu", "hardtanh")):
        reader = next(iter(reader.users)) if len(reader.users) == 1 else None
    operands = [each for each in node.all_input_nodes if each.op == "call_function"]
    return len(operands) == 2 and all("dequantize" in str(each.target) for each in operands) and (
        reader is not None and ".quantize_per_tensor" in str(reader.target))
