"""Computes in float32 what ONNX Runtime has no kernel for in bfloat16 or float64, between casts.

A part of a model may compute in another float type: ALiBi in bfloat16, positions in float64. An op in bfloat16 rounds
what it computes in float32, so its result between casts is the same; float64 is rounded to float32, which the run of
the file on the example inputs judges. Ops that only move elements stay as they are.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

from qtk.export.onnx.node_writer import NodeWriter, value_of

BFLOAT16_KERNELS = frozenset((
    "Cast", "CastLike", "Compress", "Concat", "Constant", "ConstantOfShape", "DequantizeLinear", "Flatten", "Gather",
    "GatherElements", "GatherND", "Identity", "If", "IsInf", "IsNaN", "Loop", "Pad", "QuantizeLinear", "Reshape",
    "ReverseSequence", "Scan", "ScatterElements", "ScatterND", "Shape", "Sign", "Slice", "Split", "Squeeze",
    "Transpose", "Unique", "Unsqueeze",
))
"""Operators that ONNX Runtime 1.32 runs in bfloat16 on the CPU, or that compute nothing in bfloat16 themselves."""

NO_FLOAT64_KERNEL = frozenset((
    "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Attention", "AveragePool", "Col2Im", "Conv", "ConvTranspose",
    "Cosh", "Elu", "Erf", "Gelu", "GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool", "HardSigmoid", "HardSwish",
    "Hardmax", "InstanceNormalization", "LRN", "LeakyRelu", "LpPool", "MaxRoiPool", "MaxUnpool", "Mean",
    "MeanVarianceNormalization", "Mish", "NonZero", "OneHot", "PRelu", "RNN", "Resize", "RotaryEmbedding", "Selu",
    "Sinh", "Softplus", "Softsign", "Tan", "ThresholdedRelu",
))
"""Operators that ONNX Runtime 1.32 runs in float32, and not in float64, on the CPU."""

FLOAT, BFLOAT16, DOUBLE = ir.DataType.FLOAT, ir.DataType.BFLOAT16, ir.DataType.DOUBLE

OTHER_FLOATS = frozenset({BFLOAT16, DOUBLE})
"""The types of values that files need this for."""


def compute_in_float32(model: ir.Model) -> tuple[str, ...]:
    """Lets every op without a kernel read and give float32. In place.

    Returns: the operators that computed in float64.
    """
    graph, rounded = model.graph, dict[str, None]()
    if any(value.dtype is None for node in graph.all_nodes() for value in node.outputs):
        # inside functions that the exporter has written out
        ShapeInferencePass()(model)
    for node in list(graph.all_nodes()):
        for dtype in (BFLOAT16, DOUBLE):
            if not node.domain and _lacks(node.op_type, dtype) and _cast_around(graph, node, dtype) and dtype == DOUBLE:
                rounded[node.op_type] = None
    return tuple(rounded)


def _lacks(op: str, dtype: ir.DataType) -> bool:
    return op not in BFLOAT16_KERNELS if dtype == BFLOAT16 else op in NO_FLOAT64_KERNEL


def _cast_around(graph: ir.Graph, node: ir.Node, dtype: ir.DataType) -> bool:
    """Casts what a node reads and gives in a type; whether there is any."""
    read = [index for index, value in enumerate(node.inputs) if value is not None and value.dtype == dtype]
    made = [value for value in node.outputs if value.dtype == dtype]
    writer = NodeWriter(graph, node, node.name or node.op_type, None)
    for index in read:
        value = node.inputs[index]
        assert value is not None
        node.replace_input_with(index, writer.cast(value, FLOAT))
    for value in made:
        _cast_back(node, value, dtype)
    return bool(read or made)


def _cast_back(node: ir.Node, value: ir.Value, dtype: ir.DataType) -> None:
    cast = ir.node("Cast", [value], {"to": int(dtype)}, outputs=[value_of(dtype, value.shape)])
    cast.name = f"{node.name}/{dtype.name.lower()}"
    assert node.graph is not None
    node.graph.insert_after(node, cast)
    value.replace_all_uses_with(cast.outputs[0], replace_graph_outputs=True)
    cast.replace_input_with(0, value)
    cast.outputs[0].name, value.name = value.name, f"{value.name}/float"
    value.type = ir.TensorType(FLOAT)
