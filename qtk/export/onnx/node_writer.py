"""Inserts ONNX nodes and initializers into a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from torch import Tensor

from qtk.core.free_name import free_name


class NodeWriter:
    """Inserts nodes in front of an existing one.

    Args:
        graph: the graph that gets the initializers.
        before: the node they are inserted in front of, in ``graph`` or a subgraph of it.
        name: the prefix of their names.
        shape: default shape of their results.
    """

    def __init__(self, graph: ir.Graph, before: ir.Node, name: str, shape: ir.Shape | None) -> None:
        self.graph, self.before, self.name, self.shape = graph, before, name, shape
        self._names: set[str] = set()

    def node(
        self,
        op: str,
        inputs: Sequence[ir.Value | None],
        dtype: ir.DataType,
        attributes: Mapping[str, int] | None = None,
        *,
        shape: ir.Shape | None = None,
    ) -> ir.Node:
        """Inserts a node with one result."""
        result = value_of(dtype, self.shape if shape is None else shape)
        node = ir.node(op, inputs, dict(attributes or {}), outputs=[result])
        node.name = self._free(f"{self.name}/{op}")
        result.name = self._free(f"{self.name}/{dtype.name.lower()}")
        insert_before(self.before, node)
        return node

    def _free(self, name: str) -> str:
        """``name``, with an ordinal behind it if this writer has given it already."""
        free = free_name(name, self._names, ".")
        self._names.add(free)
        return free

    def cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        if value.dtype == dtype:
            return value
        return self.node("Cast", [value], dtype, {"to": int(dtype)}, shape=value.shape).outputs[0]

    def initializer(self, name: str, array: npt.NDArray[np.generic]) -> ir.Value:
        """Adds a constant to the graph, or returns the one of this name."""
        if name in self.graph.initializers:
            return self.graph.initializers[name]
        tensor = ir.tensor(array, name=name)
        value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor)
        self.graph.register_initializer(value)
        return value


def insert_before(reader: ir.Node, node: ir.Node) -> None:
    """Inserts a node in front of ``reader``, into its graph."""
    assert reader.graph is not None
    reader.graph.insert_before(reader, node)


def value_of(dtype: ir.DataType | None, shape: ir.Shape | None) -> ir.Value:
    """A value without a name."""
    return ir.Value(type=None if dtype is None else ir.TensorType(dtype), shape=shape)


def array_of(tensor: Tensor) -> npt.NDArray[np.generic]:
    """A tensor as a numpy array on the CPU."""
    array: npt.NDArray[np.generic] = tensor.detach().cpu().contiguous().numpy()
    return array
