"""Reads the quantized tensors and the ops of an ONNX file with DequantizeLinear, whoever wrote it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import IdentityEliminationPass, LiftConstantsToInitializersPass

from qtk.errors import ExportError
from qtk.export.onnx.node_writer import stored_value
from qtk.export.onnx.qdq_nodes import SITES
from qtk.export.quantized_file import OUTPUT, QUANTIZE, FileOp, FileTensor, QuantizedFile, TensorRole

TARGET = "qtk.target"
"""Metadata key of a file: the target that it was exported for."""

DEQUANTIZE, QUANTIZES = "DequantizeLinear", ("QuantizeLinear", "DynamicQuantizeLinear")

MOVES = ("Identity", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Slice", "Split", "Expand", "Tile",
         "Pad", "DepthToSpace", "SpaceToDepth", "MaxPool", "Cast")
"""Operators whose results are elements of their first input."""

KINDS = {"Conv": "conv", "ConvTranspose": "conv_transpose", "Gemm": "linear", "MatMul": "matmul", "Gather": "embedding",
         "LayerNormalization": "layer_norm", "InstanceNormalization": "instance_norm",
         "BatchNormalization": "batch_norm", "GroupNormalization": "group_norm", "Clip": "clamp", "PRelu": "prelu"}
"""Operator → the kind that configs know it as, where that is not the operator's name in lower case."""

_PARAMETERS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "Conv": ((1,), (2,)), "ConvTranspose": ((1,), (2,)), "Gemm": ((0, 1), (2,)), "MatMul": ((0, 1), ()),
    "Gather": ((0,), ()), "LSTM": ((1, 2), (3,)), "GRU": ((1, 2), (3,)), "RNN": ((1, 2), (3,)),
    "LayerNormalization": ((1,), (2,)), "InstanceNormalization": ((1,), (2,)), "GroupNormalization": ((1,), (2,)),
    "BatchNormalization": ((1,), (2,)), "PRelu": ((1,), ()),
}
"""Operator → at which inputs it reads weights and biases."""

_FLOATS = {"FLOAT8E4M3FN": "fp8_e4m3", "FLOAT8E5M2": "fp8_e5m2", "FLOAT4E2M1": "fp4_e2m1"}


def read_contents(path: str | os.PathLike[str]) -> QuantizedFile:
    """The quantized tensors and ops of a file. Raises: ExportError if it is not ONNX."""
    try:
        model = ir.load(path)
        LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
        IdentityEliminationPass()(model)
    except Exception as error:
        raise ExportError(f"cannot read {path} as ONNX: {error}") from error
    nodes = list(model.graph.all_nodes())
    sites = _sites(model)
    tensors = tuple(_tensor(node, sites.get(_name(node), _name(node))) for node in nodes if node.op_type == DEQUANTIZE)
    ops = {node: _op(node) for node in nodes if not _is_between(node)}
    for node, op in ops.items():
        for reader, _ in _readers(node):
            op.readers.append(reader if isinstance(reader, str) else ops[reader])
    opset = model.graph.opset_imports.get("", model.opset_imports.get(""))
    return QuantizedFile("onnx", model.metadata_props.get(TARGET), opset, tensors, tuple(ops.values()))


def _sites(model: ir.Model) -> dict[str, str]:
    """Name of a DequantizeLinear → name of its site, where a file of ours says that it is another."""
    nodes: dict[str, list[Any]] = json.loads(model.metadata_props.get(SITES, "{}")).get("nodes", {})
    return {name: site for name, (site, *_) in nodes.items() if site is not None}


def _is_between(node: ir.Node) -> bool:
    """Says whether it is a quantizer or data movement, between ops."""
    return node.op_type == DEQUANTIZE or node.op_type in QUANTIZES or _moves(node)


def _moves(node: ir.Node) -> bool:
    """Says whether its results are elements of its first input; a table of codes that is looked up in is a weight."""
    if node.op_type == "Gather":
        source = _source(node.inputs[0])
        return isinstance(source, ir.Node) and not (source.op_type == DEQUANTIZE and _is_stored(source))
    return node.op_type in MOVES


def _op(node: ir.Node) -> FileOp:
    _, biases = _PARAMETERS.get(node.op_type, ((), ()))
    sources = [_source(value) for index, value in enumerate(node.inputs) if index not in biases]
    operands = tuple(isinstance(source, ir.Node) and source.op_type == DEQUANTIZE
                     for source in sources if source is not None)
    return FileOp(_name(node), node.op_type, _kinds(node), operands)


def _kinds(node: ir.Node) -> tuple[str, ...]:
    kind = KINDS.get(node.op_type, node.op_type.lower())
    if kind in ("conv", "conv_transpose") and (rank := _stored_rank(node.inputs[1])) is not None:
        return f"{kind}{rank - 2}d", kind
    if kind == "matmul" and any(_stored_rank(value) == 2 for value in node.inputs):
        return kind, "linear"
    return (kind,)


def _stored_rank(value: ir.Value | None) -> int | None:
    """The number of axes of a stored tensor, in float or dequantized; ``None`` of what is computed."""
    if value is not None and value.const_value is not None:
        return len(value.const_value.shape)
    source = _source(value)
    codes = stored_value(source.inputs[0]) if isinstance(source, ir.Node) and source.op_type == DEQUANTIZE else None
    return len(codes.const_value.shape) if codes is not None and codes.const_value is not None else None


def _source(value: ir.Value | None) -> ir.Node | ir.Value | None:
    """Returns what makes a value, data movement left out: a node, or an input of the graph; ``None`` for a constant."""
    while value is not None:
        node = value.producer()
        if node is None:
            return None if value.const_value is not None else value
        if node.op_type == "Shape":
            return None
        if not (node.op_type in MOVES or node.op_type == "Gather"):
            return node
        value = node.inputs[0]
    return None


def _readers(node: ir.Node) -> Iterator[tuple[ir.Node | str, int]]:
    """Returns what reads the results of a node and at which input, data movement left out."""
    for value in node.outputs:
        if value.is_graph_output():
            yield OUTPUT, 0
        for reader, index in value.uses():
            if reader.op_type in QUANTIZES:
                yield QUANTIZE, index
            elif _moves(reader) and index == 0:
                yield from _readers(reader)
            elif reader.op_type != "Shape" and not _is_between(reader):
                yield reader, index


def _tensor(node: ir.Node, name: str) -> FileTensor:
    codes, scale = stored_value(node.inputs[0]), node.inputs[1]
    assert codes is not None
    assert scale is not None
    readers = [(reader, index) for reader, index in _readers(node) if isinstance(reader, ir.Node)]
    zero = stored_value(node.inputs[2]) if len(node.inputs) > 2 else None
    block = node.attributes.get("block_size")
    block_size = None if block is None or block.as_int() == 0 else block.as_int()
    dtype = _codes_dtype(codes, zero)
    dynamic = scale.const_value is None
    has_codes = dtype not in _FLOATS and not _meets_floats(readers)
    stored = codes.const_value.numpy() if codes.const_value is not None and has_codes else None
    return FileTensor(
        name, _role(readers, dtype) if _is_stored(node) else "activations",
        frozenset(kind for reader, _ in readers for kind in _kinds(reader)), _FLOATS.get(dtype, dtype.lower()),
        _granularity(node, scale, block_size, dynamic=dynamic), block_size, _is_0(zero, dynamic=dynamic),
        None if stored is None or not stored.size else (int(stored.min()), int(stored.max())), dynamic,
    )


def _meets_floats(readers: list[tuple[ir.Node, int]]) -> bool:
    """Says whether every op that reads a tensor computes with floats, which no sum of codes overflows for."""
    operands = [_op(reader).operands for reader, _ in readers]
    return bool(operands) and not any(len(each) > 1 and all(each) for each in operands)


def _is_stored(dequantize: ir.Node) -> bool:
    codes = stored_value(dequantize.inputs[0])
    return codes is not None and codes.const_value is not None


def _role(readers: list[tuple[ir.Node, int]], dtype: str) -> TensorRole:
    positions = [(index, *_PARAMETERS.get(reader.op_type, ((), ()))) for reader, index in readers]
    if dtype != "INT32" and any(index in weights for index, weights, _ in positions):
        return "weights"
    return "biases" if dtype == "INT32" or any(index in biases for index, _, biases in positions) else "constants"


def _codes_dtype(codes: ir.Value, zero: ir.Value | None) -> str:
    """The ONNX type of what a DequantizeLinear reads: of stored codes, or as the zero points say, or by inference."""
    if codes.const_value is not None:
        return str(codes.const_value.dtype.name)
    if zero is not None and (dtype := zero.dtype if zero.const_value is None else zero.const_value.dtype) is not None:
        return str(dtype.name)
    makers = [value.producer() for value in (zero, codes) if value is not None]
    for node in makers:
        to = None if node is None else node.attributes.get("to") or node.attributes.get("output_dtype")
        if to is not None:
            return str(ir.DataType(to.as_int()).name)
    return "UINT8"


def _granularity(node: ir.Node, scale: ir.Value, block_size: int | None, *, dynamic: bool) -> str:
    if block_size is not None:
        return "per_token" if dynamic else "per_block"
    if scale.const_value is None or not scale.const_value.shape:
        return "per_tensor"
    codes, axis = stored_value(node.inputs[0]), node.attributes.get("axis")
    shape = None if codes is None else codes.shape
    index = 1 if axis is None else axis.as_int()
    length = None if shape is None or index >= len(shape) else shape[index]
    return "per_channel" if scale.const_value.size > 1 or length == 1 else "per_tensor"


def _is_0(zero: ir.Value | None, *, dynamic: bool) -> bool | None:
    """Says whether all zero points are 0; an input that is left out means so."""
    if zero is None:
        return True
    if zero.const_value is None:
        return None if dynamic else False
    return not np.any(zero.const_value.numpy().astype("float32"))


def _name(node: ir.Node) -> str:
    return str(node.name or (node.outputs[0].name if node.outputs else None) or node.op_type)
