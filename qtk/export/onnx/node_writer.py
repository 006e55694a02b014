"""Finds the DequantizeLinears of an ONNX graph, and inserts nodes and initializers into it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import TypeGuard

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from torch import Tensor

from qtk.core.free_name import free_name
from qtk.export.onnx.names import ValueNames

LENGTHS = "lengths"
"""Metadata key of a DequantizeLinear until the file is complete: pairs of an axis and the length of the site along it,
where the codes are longer; what is behind has no meaning, or repeats."""


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
        """Adds a constant to the graph, or returns the constant of this name."""
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


class DequantizeNodes:
    """Adds DequantizeLinear nodes to a graph.

    Args:
        names: of the values of the graph.
    """

    def __init__(self, names: ValueNames) -> None:
        self.names = names

    def like(self, dequantize: ir.Node, codes: ir.Value, shape: ir.Shape | None) -> ir.Node:
        """A node that dequantizes ``codes`` as ``dequantize`` does its own; it is in no graph yet."""
        result = self._named("DequantizeLinear", dequantize, [codes, *dequantize.inputs[1:]],
                             dequantize.outputs[0].dtype, shape)
        result.metadata_props.update(dequantize.metadata_props)
        return result

    def longer(
        self, dequantize: ir.Node, codes: ir.Value, shape: ir.Shape, before: ir.Node, *, axis: int
    ) -> ir.Value:
        """Dequantizes ``codes`` in front of a node: the codes of ``dequantize``, and more behind them along an axis."""
        value, result = dequantize.outputs[0], self.like(dequantize, codes, shape)
        assert value.shape is not None
        result.metadata_props[LENGTHS] = json.dumps([[axis, value.shape[axis]]])
        insert_before(before, result)
        return result.outputs[0]

    def quantized_like(self, dequantize: ir.Node, value: ir.Value, before: ir.Node) -> ir.Value:
        """The codes of ``value`` that ``dequantize`` would dequantize, computed in front of a node."""
        codes = codes_of(dequantize)
        quantize = self._named("QuantizeLinear", dequantize, [value, *dequantize.inputs[1:]], codes.dtype, value.shape)
        insert_before(before, quantize)
        return quantize.outputs[0]

    def behind(self, value: ir.Value, dequantize: ir.Node) -> None:
        """Makes ``value``, a result of a node, codes; their readers get them dequantized like by ``dequantize``."""
        result = self.like(dequantize, value, value.shape)
        if value.is_graph_output():
            assert value.name is not None
            self.names.give(result.outputs[0], value.name)
        value.replace_all_uses_with(result.outputs[0], replace_graph_outputs=True)
        result.replace_input_with(0, value)
        value.dtype = codes_of(dequantize).dtype
        producer = value.producer()
        assert producer is not None
        assert producer.graph is not None
        producer.graph.insert_after(producer, result)

    def _named(
        self, op: str, like: ir.Node, inputs: Sequence[ir.Value | None], dtype: ir.DataType | None,
        shape: ir.Shape | None,
    ) -> ir.Node:
        node = ir.node(op, inputs, like.attributes, outputs=[value_of(dtype, shape)])
        self.names.give(node.outputs[0], self.names.free(like.outputs[0].name or op))
        node.name = node.outputs[0].name
        return node


def dequantize_of(value: ir.Value | None) -> ir.Node | None:
    """The DequantizeLinear that makes ``value``, one scale for all of it; else ``None``."""
    producer = None if value is None else value.producer()
    while producer is not None and producer.op_type == "Identity":
        (source,) = producer.inputs
        producer = None if source is None else source.producer()
    if producer is None or producer.op_type != "DequantizeLinear":
        return None
    scale = producer.inputs[1]
    return producer if scale is not None and scale.shape is not None and len(scale.shape) == 0 else None


def codes_of(dequantize: ir.Node) -> ir.Value:
    """Returns what a DequantizeLinear reads."""
    codes = dequantize.inputs[0]
    assert codes is not None
    return codes


def stored_value(value: ir.Value | None) -> ir.Value | None:
    """The initializer that a value is, or that codes of fewer bits are cast from when a file is loaded; else itself."""
    producer = None if value is None else value.producer()
    if producer is None or producer.op_type != "Cast":
        return value
    source = producer.inputs[0]
    return source if source is not None and source.const_value is not None else value


def is_integer(kind: ir.DataType | None) -> TypeGuard[ir.DataType]:
    """Says whether codes are of an integer type: many operators have no float8, in ONNX or in ONNX Runtime."""
    return kind is not None and kind.is_integer()


def have_equal_encodings(a: ir.Node, b: ir.Node) -> bool:
    """Says whether two nodes quantize or dequantize by equal constants, of one type and along one axis."""
    pairs = [[None if each is None else ir.convenience.get_const_tensor(each) for each in pair]
             for pair in zip_longest(a.inputs[1:], b.inputs[1:])]
    axes = [node.attributes["axis"].as_int() if "axis" in node.attributes else None for node in (a, b)]
    return axes[0] == axes[1] and all(
        one is not None and other is not None and one.dtype == other.dtype
        and np.array_equal(one.numpy(), other.numpy()) for one, other in pairs)
