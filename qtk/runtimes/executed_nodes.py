"""What ONNX Runtime executes of a file: its optimized graph, with the reason of every node that computes in float.

A node of the optimized graph is found in the exported one by the value it makes, else by its name. There, a value is
quantized if it comes from a DequantizeLinear, possibly through nodes that only move values.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import onnx

from qtk.core.spec import QuantSpec
from qtk.export.onnx.names import op_of
from qtk.export.onnx.onnxruntime.moved_codes import FOLLOWED
from qtk.export.onnx.stored_sites import stored_sites
from qtk.report.runtime_nodes import FloatNode, RuntimeNodes

WEIGHTED = frozenset((
    "Conv", "FusedConv", "NhwcFusedConv", "ConvTranspose", "Gemm", "FusedGemm", "MatMul", "FusedMatMul", "Einsum",
    "LSTM", "GRU", "RNN", "Attention", "MultiHeadAttention", "GroupQueryAttention",
))
"""Float kinds that multiply and add up."""

INTEGER = re.compile(r"QLinear|QGemm|Integer|DynamicQuantize(MatMul|LSTM)|QAttention|MatMulNBits|QMoE|QOrdered")
"""Kinds that compute in integers, or on integer weights."""

WITH_INTEGER_KERNEL = WEIGHTED - {"ConvTranspose", "LSTM", "GRU", "RNN"} | frozenset((
    "Add", "Mul", "Sigmoid", "LeakyRelu", "AveragePool", "GlobalAveragePool", "Concat", "Softmax", "Where",
))
"""Kinds that ONNX Runtime turns into an integer kernel, between Q/DQ."""

MOVING = frozenset((
    "Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Slice", "Split", "Gather", "GatherND",
    "GatherElements", "Expand", "Tile", "Concat", "Pad", "Resize", "DepthToSpace", "SpaceToDepth", "MaxPool",
    "ReorderInput", "ReorderOutput", "ScatterND", "ScatterElements", "Where", "Shape", "Size", "Constant",
    "ConstantOfShape", "Range", "Cast", "QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "If", "Loop",
    "Scan", "SequenceConstruct", "SequenceAt", "ConcatFromSequence", "SplitToSequence", "Trilu", "NhwcMaxPool",
    "MemcpyFromHost", "MemcpyToHost", "ArgMax", "ArgMin", "TopK", "Upsample", "ReverseSequence", "Compress",
))
"""Kinds that move, choose or convert values, or hold bodies, whose nodes are counted themselves."""

PASSED = (*FOLLOWED, "Cast", "Max")
"""Kinds between a DequantizeLinear and a product that do not keep it in float, and Max of one input, which is there for
a reason of its own."""

LOOPS = ("Scan", "Loop", "If")
"""Kinds with bodies."""

FLOATS = {onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16, onnx.TensorProto.DOUBLE}


def executed_nodes(optimized: Path, exported: Path, reasons: Mapping[str, str]) -> RuntimeNodes:
    """The integer and float nodes of a file that ONNX Runtime has optimized.

    Args:
        optimized: the optimized file, as ``create_session(…, optimized_file=…)`` writes it.
        exported: the file before.
        reasons: name of a site that is not quantized → why, as in ``QuantPlan.unquantized``.
    """
    graph = onnx.load(optimized, load_external_data=False).graph
    file = _ExportedFile(exported, reasons)
    types = {
        value.name: value.type.tensor_type.elem_type
        for each in _graphs(graph) for value in (*each.value_info, *each.output, *each.input)
    }
    integer: Counter[str] = Counter()
    floats = []
    for node in (node for each in _graphs(graph) for node in each.node):
        if INTEGER.search(node.op_type):
            integer[node.op_type] += 1
        elif node.op_type not in MOVING and types.get(node.output[0], onnx.TensorProto.FLOAT) in FLOATS:
            op, reason = file.explain(node)
            floats.append(FloatNode(node.op_type, op, reason, node.op_type in WEIGHTED))
    return RuntimeNodes(dict(integer), tuple(floats))


def ops_of_nodes(optimized: Path, exported: Path) -> dict[str, str]:
    """Name of each node of a file that ONNX Runtime has optimized → the op of the model that it belongs to.

    Arguments as for ``executed_nodes``. A node that quantizes or dequantizes the value of a site belongs to the op that
    makes the value; one whose op is not known is named by itself.
    """
    graph, names = onnx.load(optimized, load_external_data=False).graph, ExportedNames(exported)
    return {node.name: names.op(node) for each in _graphs(graph) for node in each.node}


def computing_kinds(optimized: Path) -> Counter[str]:
    """Counts the nodes that compute, by kind; two graphs with equal counts have the same fusions."""
    graph = onnx.load(optimized, load_external_data=False).graph
    return Counter(node.op_type for each in _graphs(graph) for node in each.node if node.op_type not in MOVING)


class ExportedNames:
    """The nodes of an exported file, by name and by what they make."""

    def __init__(self, path: Path) -> None:
        self.graph = onnx.load(path, load_external_data=False).graph
        self.nodes = [node for each in _graphs(self.graph) for node in each.node]
        self.makers = {output: node for node in self.nodes for output in node.output}
        self.named = {node.name: node for node in self.nodes}

    def op(self, node: onnx.NodeProto) -> str:
        """The op that a node of the optimized graph belongs to; its own name where that is not known."""
        name = re.sub(r"_token_\d+$", "", node.name)
        while name and name not in self.named:  # ONNX Runtime appends to the names of what it fuses
            name = name.rpartition("/")[0]
        original = self.named.get(name) or self._by_output(node)
        if original is None:
            return str(node.name or node.op_type)
        if original.op_type == "DequantizeLinear":
            return str(original.name).partition(":")[0]
        named = str(original.name) if ":" not in original.output[0] else str(original.output[0])
        return (op_of(original.name) or named).partition(":")[0]

    def _by_output(self, node: onnx.NodeProto) -> onnx.NodeProto | None:
        for output in (*node.output, node.name.removesuffix("_nchwc")):
            maker = self.makers.get(output)
            while node.op_type in WEIGHTED and maker is not None and maker.op_type not in WEIGHTED and maker.input:
                maker = self.makers.get(maker.input[0])  # fused with the activation that makes the output
            if maker is not None:
                return maker
        return None


class _ExportedFile(ExportedNames):
    """The graph as it was exported, and why values in it are not quantized."""

    def __init__(self, path: Path, reasons: Mapping[str, str]) -> None:
        super().__init__(path)
        graph, nodes = self.graph, self.nodes
        self.reasons = reasons
        self.readers = {name: node for node in nodes for name in node.input}
        self.initializers = {tensor.name for each in _graphs(graph) for tensor in each.initializer}
        self.specs: dict[str, QuantSpec] = {site.node.name or "": site.spec for site in stored_sites(path)}

    def explain(self, node: onnx.NodeProto) -> tuple[str, str]:
        """The op that a node of the optimized graph computes, and why it is in float."""
        original = self._original(node)
        if original is None:
            return node.name or node.op_type, "made by ONNX Runtime's optimizer"
        op = op_of(original.name) or original.name
        return op, self._reason(original, node.op_type, op_of(original.name))

    def _original(self, node: onnx.NodeProto) -> onnx.NodeProto | None:
        return self._by_output(node) or self.named.get(re.sub(r"_token_\d+$", "", node.name))

    def _reason(self, original: onnx.NodeProto, kind: str, op: str | None) -> str:
        if kind not in WITH_INTEGER_KERNEL and original.op_type not in WITH_INTEGER_KERNEL:
            return f"ONNX Runtime has no integer kernel for {original.op_type}"
        count = 2 if original.op_type in WEIGHTED else len(original.input)
        barrier = next(filter(None, map(self._barrier, original.input[:count])), None)
        if barrier is not None:
            return f"{barrier} stands between DequantizeLinear and {original.op_type}"
        found = [self._input_reason(name, op) for name in original.input[:count] if name]
        missing = [reason for reason in found if reason is not None]
        if missing:
            return "; ".join(dict.fromkeys(missing))
        output = self._output_reason(original, op)
        if output is not None:
            return output
        if original.op_type == "Softmax":
            return "ONNX Runtime's integer Softmax computes other codes than the simulation"
        dtypes = [str(self.specs[source].dtype) for name in original.input[:count] if (source := self._source(name))]
        return f"no integer kernel for {original.op_type} of {' × '.join(dtypes)}"

    def _input_reason(self, name: str, op: str | None) -> str | None:
        """Says why an input is in float; ``None`` if it is quantized."""
        if self._source(name):
            return None
        name = self._moved(name)
        if name in self.initializers:
            return f"parameter in float ({self.reasons.get(name, 'not quantized in the file')})"
        maker = self.makers.get(name)
        if maker is None:
            return f"input in float ({self.reasons.get(f'{name}:input', 'it comes from outside')})"
        if maker.op_type == "Constant":
            return "a constant in float"
        made_by = op_of(maker.name)
        if made_by is not None and made_by == op:
            return "inside an op that ONNX writes as several nodes"
        return f"input in float ({self.reasons.get(f'{made_by}:out', 'not quantized in the file')})"

    def _barrier(self, name: str) -> str | None:
        """The kind of the node, next to ``name``, by which ONNX Runtime does not see that ``name`` is dequantized."""
        kinds: list[str] = []
        while (maker := self.makers.get(name)) is not None and maker.op_type != "DequantizeLinear":
            if not _moves(maker) or not maker.input or maker.op_type in LOOPS:
                return None
            kinds.append(maker.op_type)
            name = self._mover_input(maker)
        is_computed = maker is not None and maker.input[0] not in self.initializers
        return next((kind for kind in kinds if kind not in PASSED), None) if is_computed else None

    def _output_reason(self, node: onnx.NodeProto, op: str | None) -> str | None:
        """Says why the output is in float; ``None`` if it is quantized, or an activation behind it is."""
        name = node.output[0]
        for _ in range(3):  # a rectifier or a clip may stand before QuantizeLinear
            reader = self.readers.get(name)
            if reader is None or reader.op_type == "QuantizeLinear":
                return None if reader is not None else f"output in float ({self.reasons.get(f'{op}:out', 'returned')})"
            if reader.op_type not in ("Relu", "Clip", "Min", "Max", "Identity", *MOVING):
                break
            name = reader.output[0]
        made_by_several = op is not None and self.readers.get(name) is not None and op_of(self.readers[name].name) == op
        if made_by_several and f"{op}:out" not in self.reasons:
            return "inside an op that ONNX writes as several nodes"
        return f"output in float ({self.reasons.get(f'{op}:out', 'not quantized in the file')})"

    def _source(self, name: str) -> str | None:
        """The DequantizeLinear that a value comes from, by name; ``None`` if there is none."""
        maker = self.makers.get(self._moved(name))
        return maker.name if maker is not None and maker.op_type == "DequantizeLinear" else None

    def _moved(self, name: str) -> str:
        """The value that ``name`` is, before it was moved."""
        while (maker := self.makers.get(name)) is not None and _moves(maker) and maker.input:
            if maker.op_type in ("DequantizeLinear", *LOOPS):
                break
            name = self._mover_input(maker)
        return name

    def _mover_input(self, node: onnx.NodeProto) -> str:
        """The input whose values a node moves; of a mask that hides values behind a constant, these values."""
        if node.op_type != "Where":
            return str(node.input[0])
        hidden = node.input[1] in self.initializers or _is_constant(self.makers.get(node.input[1]))
        return str(node.input[2 if hidden else 1])


def _moves(node: onnx.NodeProto) -> bool:
    """Says whether a node moves or converts values; Max of one input returns it."""
    return node.op_type in MOVING or (node.op_type == "Max" and len(node.input) == 1)


def _is_constant(node: onnx.NodeProto | None) -> bool:
    return node is not None and node.op_type in ("Constant", "ConstantOfShape")


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """A graph and the graphs inside its nodes."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _graphs(attribute.g)
