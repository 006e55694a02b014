"""Writes layers of LSTMs as DynamicQuantizeLSTM, an operator of ONNX Runtime's own, and reads them back.

The operator (onnxruntime/contrib_ops/cpu/quantization/dynamic_quantize_lstm.cc, 1.32) quantizes the input of all time
steps, and the hidden state of each, to uint8 by DynamicQuantizeLinear, multiplies the codes with stored int8 weights,
and computes sums, gates and cell state in float32. A range covers all rows of a product: in batches above one,
where threads share the rows of the hidden state, each thread has the range of its own rows.

It holds codes as [1, in, 4 · hidden], in the order input, output, forget and cell gate; torch's are [4 · hidden, in],
in the order input, forget, cell, output. The DequantizeLinear nodes of the four sites leave the file; readers of the
file get them back.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from qtk.export.onnx.marked_graph import DOMAIN, DYNAMIC_LSTM
from qtk.export.onnx.node_writer import NodeWriter, codes_of, insert_before
from qtk.export.onnx.qdq_nodes import SITES

CONTRIB, OPERATOR = "com.microsoft", "DynamicQuantizeLSTM"

LSTMS = "lstms"
"""Key in the metadata ``qtk.sites``: name of such a node → names of the DequantizeLinear nodes of its input, hidden
state and two weights."""

FLOAT = ir.DataType.FLOAT

GATES = (0, 3, 1, 2)
"""Positions of the operator's gates among torch's, and (1, 2, 3 are a cycle of the other order) …"""

TORCH_GATES = (0, 2, 3, 1)
"""… of torch's among the operator's."""

WEIGHTS = ((1, 8), (2, 10))
"""Inputs of the operator: codes, and scale, of each weight."""


def write_dynamic_lstms(model: ir.Model) -> None:
    """Replaces every node ``qtk::DynamicLSTM``, whose products read dequantized values. In place."""
    record, written = json.loads(model.metadata_props[SITES]), {}
    for node in list(model.graph.all_nodes()):
        if node.domain == DOMAIN and node.op_type == DYNAMIC_LSTM:
            written[node.name] = _Written(node, model.graph).write()
    if written:
        model.metadata_props[SITES] = json.dumps({**record, LSTMS: written}, separators=(",", ":"))
        model.opset_imports[CONTRIB] = 1
        RemoveUnusedNodesPass()(model)


class _Written:
    """Replaces one node. Args: node: the node; graph: the graph of the file, which holds the initializers."""

    def __init__(self, node: ir.Node, graph: ir.Graph) -> None:
        assert node.name is not None
        self.node = node
        self.writer = NodeWriter(graph, node, node.name, None)

    def write(self) -> list[str | None]:
        """Returns: the names of the DequantizeLinear nodes of input, hidden state and weights."""
        data, hidden, cell, w_ih, w_hh, *biases = self.node.inputs
        read = [_dequantize(value) for value in (data, hidden, w_ih, w_hh)]
        reals = [_quantized(dequantize) for dequantize in read[:2]]
        assert cell is not None
        states = [self._moved("Unsqueeze", value, 0) for value in (reals[1], cell)]
        weights = [self._weight(dequantize) for dequantize in read[2:]]
        stored = [each for _, *scales in weights for each in scales]
        inputs = [reals[0], *(codes for codes, *_ in weights), self._bias(biases), None, *states, None, *stored]
        self._replace(inputs)
        return [dequantize.name for dequantize in read]

    def _replace(self, inputs: Sequence[ir.Value | None]) -> None:
        backwards = self.node.attributes["backwards"].as_int()
        hidden_size = int(inputs[2].shape[1])  # type: ignore[union-attr]
        operator = ir.node(
            OPERATOR, inputs, {"hidden_size": hidden_size, "direction": "reverse" if backwards else "forward"},
            domain=CONTRIB, num_outputs=len(self.node.outputs), name=self.node.name,
        )
        insert_before(self.node, operator)
        for result, value, axis in zip(operator.outputs, self.node.outputs, (1, 0, 0), strict=True):
            result.name, result.dtype = f"{value.name}/{OPERATOR}", FLOAT
            squeezed = self._moved("Squeeze", result, axis)
            squeezed.shape, name = value.shape, value.name
            value.replace_all_uses_with(squeezed, replace_graph_outputs=True)
            value.name, squeezed.name = f"{name}/replaced", name
        assert self.node.graph is not None
        self.node.graph.remove(self.node, safe=True)

    def _weight(self, dequantize: ir.Node) -> tuple[ir.Value, ir.Value, ir.Value]:
        """The codes as the operator holds them, and its scale and zero point: one, or one for each row of a gate."""
        codes, scale = codes_of(dequantize), dequantize.inputs[1]
        assert scale is not None
        name, numbers, scales = f"{codes.name}/{OPERATOR}", _array(codes), _array(scale)
        scales = _by_gate(scales, GATES).reshape(1, -1) if scales.ndim else scales.reshape(1)
        return (
            self.writer.initializer(name, np.ascontiguousarray(_by_gate(numbers, GATES).T[None])),
            self.writer.initializer(f"{name}.scale", scales),
            self.writer.initializer(f"{name}.zero_point", np.zeros(scales.shape, numbers.dtype)),
        )

    def _bias(self, biases: Sequence[ir.Value | None]) -> ir.Value | None:
        given = [bias for bias in biases if bias is not None]
        if not given:
            return None
        assert given[0].shape is not None
        size = int(given[0].shape[0])
        order = self.writer.initializer(f"qtk.gates.{size}", _by_gate(np.arange(size), GATES))
        parts = [self._node("Gather", [bias, order], ir.Shape([size])) for bias in given]
        return self._moved("Unsqueeze", self._node("Concat", parts, ir.Shape([2 * size]), {"axis": 0}), 0)

    def _moved(self, op: str, value: ir.Value, axis: int) -> ir.Value:
        axes = self.writer.initializer(f"qtk.axis.{axis}", np.array([axis]))
        sizes = list(value.shape) if value.shape is not None else []
        shape = ir.Shape([*sizes[:axis], 1, *sizes[axis:]]) if op == "Unsqueeze" and sizes else None
        return self._node(op, [value, axes], shape)

    def _node(
        self, op: str, inputs: Sequence[ir.Value], shape: ir.Shape | None, attributes: dict[str, int] | None = None
    ) -> ir.Value:
        return self.writer.node(op, inputs, FLOAT, attributes, shape=shape).outputs[0]


def restore_lstms(model: ir.Model) -> None:
    """Adds the nodes that left the file with ``write_dynamic_lstms``, and products that nothing reads. In place."""
    written = json.loads(model.metadata_props.get(SITES, "{}")).get(LSTMS, {})
    present = {node.name for node in model.graph.all_nodes()}
    for operator in list(model.graph.all_nodes()) if written else ():
        if operator.name not in written or operator.op_type != OPERATOR:
            continue
        writer = NodeWriter(model.graph, operator, f"{operator.name}/restored", None)
        data, hidden, *weights = written[operator.name]
        products = zip(((0, data), (5, hidden)), WEIGHTS, weights, strict=True)
        for (index, read), (codes_at, scale_at), name in products:
            value = operator.inputs[index]
            assert value is not None
            _name(factor := _dynamic(writer, value), read)
            if name not in present:
                present.add(name)
                _name(weight := _stored(writer, operator.inputs[codes_at], operator.inputs[scale_at], name), name)
                turned = writer.node("Transpose", [weight.outputs[0]], FLOAT)
                turned.attributes["perm"] = ir.AttrInt64s("perm", [1, 0])
                writer.node("MatMul", [factor.outputs[0], turned.outputs[0]], FLOAT)


def _dynamic(writer: NodeWriter, value: ir.Value) -> ir.Node:
    node = writer.node("DynamicQuantizeLinear", [value], ir.DataType.UINT8)
    node.resize_outputs(3)
    for output, kind in ((node.outputs[1], "scale"), (node.outputs[2], "zero_point")):
        output.name = f"{node.name}.{kind}"
    return writer.node("DequantizeLinear", list(node.outputs), FLOAT)


def _stored(writer: NodeWriter, codes: ir.Value | None, scale: ir.Value | None, name: str) -> ir.Node:
    """A DequantizeLinear of a weight in torch's order."""
    assert codes is not None
    assert scale is not None
    numbers, scales = _by_gate(_array(codes)[0].T, TORCH_GATES), _array(scale)
    by_row = scales.ndim == 2
    scales = _by_gate(scales[0], TORCH_GATES) if by_row else scales.reshape(())
    zeros = np.zeros(scales.shape, numbers.dtype)
    parts = {"codes": numbers, "scale": scales, "zero_point": zeros}
    inputs = [writer.initializer(f"{name}/{kind}", np.ascontiguousarray(array)) for kind, array in parts.items()]
    return writer.node("DequantizeLinear", inputs, FLOAT, {"axis": 0} if by_row else {})


def _name(node: ir.Node, name: str) -> None:
    node.name, node.outputs[0].name = name, f"{name}/float"


def _dequantize(value: ir.Value | None) -> ir.Node:
    dequantize = None if value is None else value.producer()
    assert dequantize is not None
    assert dequantize.op_type == "DequantizeLinear"
    return dequantize


def _quantized(dequantize: ir.Node) -> ir.Value:
    """The value of a site with dynamic quantization, before it is quantized."""
    quantize = codes_of(dequantize).producer()
    assert quantize is not None
    value = quantize.inputs[0]
    assert value is not None
    return value


def _array(value: ir.Value) -> npt.NDArray[np.generic]:
    assert value.const_value is not None
    array: npt.NDArray[np.generic] = value.const_value.numpy()
    return array


def _by_gate(rows: npt.NDArray[np.generic], gates: Sequence[int]) -> npt.NDArray[np.generic]:
    """Rows of four gates one after the other, in another order of the gates."""
    parts = np.split(rows, 4)
    return np.concatenate([parts[gate] for gate in gates])
