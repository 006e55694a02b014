"""Names in an ONNX graph: unique ones of values; inputs, outputs, sites and nodes have theirs of the prepared model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import onnx_ir as ir
from torch import fx

from qtk.core.free_name import free_name, unique
from qtk.export.free_axes import EqualAxes
from qtk.graph.sites import OP, OWNER, join, label
from qtk.operators.targets import path_of


class ValueNames:
    """The names in use in a graph, its subgraphs included."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._values: dict[str, ir.Value] = {}
        for value in _values(graph):
            self.give(value, value.name or "value")

    def give(self, value: ir.Value, name: str) -> None:
        """Names ``value``; another value that has this name is renamed."""
        current = self._values.get(name)
        if current is value:
            return
        if current is not None:
            self._rename(current, self.free(name))
        self._rename(value, name)

    def free(self, name: str) -> str:
        """``name``, or ``name`` with the first suffix ``_1``, ``_2``, … that is not in use."""
        return free_name(name, self._values)

    def _rename(self, value: ir.Value, name: str) -> None:
        before = value.name
        if before is not None and self._values.get(before) is value:
            del self._values[before]
        value.name = name
        self._values[name] = value


def name_inputs_and_outputs(graph: ir.Graph, names: ValueNames, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Names the inputs and outputs of the graph as the model's signature does; a repeated name gets ``_1``."""
    values = [*zip(graph.inputs, inputs, strict=True), *zip(graph.outputs, outputs, strict=True)]
    for (value, _), name in zip(values, unique(wanted for _, wanted in values), strict=True):
        names.give(value, name)


def name_lengths(graph: ir.Graph, equal: Sequence[EqualAxes]) -> None:
    """Gives each dynamic length of the inputs one name in place of torch's symbols (``s77``).

    The name comes from ``equal``, else is ``batch`` for the first dynamic axis 0, else the first of torch's symbols.
    """
    lengths = {(value.name, axis): length.value for value in graph.inputs
               for axis, length in enumerate(value.shape or ()) if isinstance(length, ir.SymbolicDim) and length.value}
    taken = {each.name for each in equal}
    names: dict[str, str] = {}
    for each in equal:
        symbols = [lengths[axis] for axis in lengths if axis in each.axes]
        names |= dict.fromkeys(symbols, each.name or next(iter(symbols), ""))
    first = next((length for (_, axis), length in lengths.items() if axis == 0), None)
    if first is not None and "batch" not in taken and names.get(first, first) not in taken:
        batch = names.get(first, first)
        names[first] = "batch"
        names |= {symbol: "batch" for symbol, name in names.items() if name == batch}
    for value in _values(graph):
        if value.shape is not None:
            value.shape = ir.Shape([
                re.sub(r"\w+", lambda word: names.get(word[0], word[0]), length.value)
                if isinstance(length, ir.SymbolicDim) and length.value else length for length in value.shape
            ])


def fix_lengths(graph: ir.Graph) -> None:
    """Replaces symbolic lengths whose symbol is a number (``16``), fixed after capture, by that number."""
    for value in _values(graph):
        if value.shape is not None:
            value.shape = ir.Shape([
                int(length.value) if isinstance(length, ir.SymbolicDim) and (length.value or "").isdigit() else length
                for length in value.shape
            ])


def drop_inferred_types(graph: ir.Graph) -> None:
    """Removes dtype and shape of values between inputs and outputs, and of initializers, whose tensors have them."""
    subgraphs = {node.graph for node in graph.all_nodes() if node.graph is not None}
    outputs = {value for each in [graph, *subgraphs] for value in each.outputs}
    initializers = [value for each in [graph, *subgraphs] if isinstance(each, ir.Graph)
                    for value in each.initializers.values()]
    for value in [*(output for node in graph.all_nodes() for output in node.outputs), *initializers]:
        if value not in outputs:
            value.type = value.shape = None
            value.metadata_props.clear()


def _values(graph: ir.Graph) -> list[ir.Value]:
    values = [*graph.inputs, *graph.initializers.values()]
    for node in graph.all_nodes():
        values.extend(output for output in node.outputs if output.name)
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                values.extend(attribute.as_graph().inputs)
    return values


def name_nodes(model: ir.Model) -> None:
    """Names every node whose origin torch's exporter recorded ``<op>/<kind>``: ``blocks.0.attn.qkv/MatMul``. In place.

    An op may become several nodes; nodes of one kind are numbered. Constants lose their names, which would only take
    room; other nodes keep theirs. Parameters have the names of the original model.
    """
    for value in list(model.graph.initializers.values()):
        value.name = path_of(value.name)
    counts: Counter[str] = Counter()
    for node in model.graph.all_nodes():
        if node.op_type == "Constant":
            node.name = None
            continue
        origin = node.meta.get("node")
        if not isinstance(origin, fx.Node):
            continue
        op = join(label(origin, OWNER) or "", label(origin, OP) or "")
        if op:
            name = f"{op}/{node.op_type}"
            node.name = f"{name}_{counts[name]}" if counts[name] else name
            counts[name] += 1


def op_of(name: str) -> str | None:
    """The op in a name that ``name_nodes`` gave, also after a runtime has put something behind it; else ``None``.

    >>> op_of("blocks.0.attn.qkv/MatMul_1_token_4"), op_of("node_Squeeze_12")
    ('blocks.0.attn.qkv', None)
    """
    return name.rpartition("/")[0] or None
