"""Reads the quantized tensors and the ops of an exported program, as ``quantized_decomposed`` ops express them."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from qtk.core.dtypes import BITS, DTYPES, INT32
from qtk.errors import ExportError, first_line
from qtk.export.quantized_file import OUTPUT, QUANTIZE, FileOp, FileTensor, QuantizedFile, TensorRole
from qtk.graph.sites import SITE, label
from qtk.operators.lookup import row_of
from qtk.operators.op_row import Role
from qtk.operators.targets import schema_arguments
from qtk.torch_private import load_decomposed_ops

TARGET = "qtk.target"
"""Name of the extra file in a ``.pt2``: the target that it was exported for."""

_FLOATS = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}

_QUANTIZE, _DEQUANTIZE = "quantized_decomposed.quantize_", "quantized_decomposed.dequantize_"


def read_contents(path: str | os.PathLike[str]) -> QuantizedFile:
    """The quantized tensors and ops of a file. Raises: ExportError if it is no exported program."""
    load_decomposed_ops()
    extra = {TARGET: ""}
    try:
        program = torch.export.load(path, extra_files=extra)
    except Exception as error:
        raise ExportError(f"cannot read {path} as an exported program: {first_line(error)}") from error
    signature = program.graph_signature
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers,
             **signature.inputs_to_lifted_tensor_constants}
    held: dict[str, Any] = {**program.state_dict, **program.constants}
    constants = {name: held[target] for name, target in names.items() if target in held}
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    tensors = tuple(_tensor(node, constants) for node in nodes if _is(node, _DEQUANTIZE))
    ops = {node: _op(node, constants) for node in nodes if _is_op(node)}
    for node, op in ops.items():
        for reader, _ in _readers(node):
            op.readers.append(reader if isinstance(reader, str) else ops[reader])
    return QuantizedFile("pt2e", extra[TARGET] or None, None, tensors, tuple(ops.values()))


def _is(node: fx.Node, prefix: str) -> bool:
    return node.op == "call_function" and str(node.target).startswith(prefix)


def _moves(node: fx.Node) -> bool:
    row = row_of(node)
    return node.target is operator.getitem or (row is not None and row.role is Role.MOVEMENT)


def _is_op(node: fx.Node) -> bool:
    """Says whether it computes values with a row in the op table; quantizers, data movement and sizes do not."""
    row = row_of(node)
    return (not _is(node, "quantized_decomposed.") and not _moves(node) and row is not None
            and row.role in (Role.COMPUTE, Role.MERGE))


def _op(node: fx.Node, constants: dict[str, Any]) -> FileOp:
    row = row_of(node)
    assert row is not None
    operands = tuple(
        _is(source, _DEQUANTIZE) for value, index in _operands(node)
        if index != row.bias and (source := _source(value)).name not in constants
        and isinstance(source.meta.get("val"), Tensor) and source.meta["val"].is_floating_point()
    )
    return FileOp(node.name, str(node.target), row.names, operands)


def _operands(node: fx.Node) -> Iterator[tuple[fx.Node, int]]:
    """The nodes that a call reads, each with the position of the argument."""
    for index, argument in enumerate(node.args):
        listed = argument if isinstance(argument, (list, tuple)) else (argument,)
        yield from ((each, index) for each in listed if isinstance(each, fx.Node))


def _source(node: fx.Node) -> fx.Node:
    """Returns what makes a value, data movement left out."""
    while node.op == "call_function" and _moves(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _readers(node: fx.Node) -> Iterator[tuple[fx.Node | str, int]]:
    """Returns what reads the result of a node and at which argument, data movement left out."""
    for user in node.users:
        if user.op == "output":
            yield OUTPUT, 0
        elif _is(user, _QUANTIZE):
            yield QUANTIZE, 0
        elif _moves(user):
            yield from _readers(user)
        elif _is_op(user):
            yield from ((user, index) for value, index in _operands(user) if value is node)


def _tensor(node: fx.Node, constants: dict[str, Any]) -> FileTensor:
    given = schema_arguments(node)
    scale, zero = (next(given[name] for name in names if name in given)
                   for names in (("scale", "scales"), ("zero_point", "zero_points")))
    codes = node.args[0]
    assert isinstance(codes, fx.Node)
    stored = constants.get(codes.name)
    scale, zero = (constants.get(each.name, each) if isinstance(each, fx.Node) else each for each in (scale, zero))
    dynamic = isinstance(scale, fx.Node)
    readers = [(reader, index) for reader, index in _readers(node) if isinstance(reader, fx.Node)]
    dtype = _dtype(given)
    kind = str(node.target).removeprefix(_DEQUANTIZE)
    granularity = next(name for name in ("per_channel_group", "per_channel", "per_token", "per_tensor") if name in kind)
    block_size = None
    if granularity == "per_channel_group" and isinstance(stored, Tensor) and isinstance(scale, Tensor):
        granularity, block_size = "per_block", stored.shape[1] // scale.shape[1]
    integers = stored if isinstance(stored, Tensor) and not stored.is_floating_point() else None
    zeros = None if isinstance(zero, fx.Node) else zero is None or not torch.as_tensor(zero).any()
    return FileTensor(
        label(node, SITE) or node.name, "activations" if stored is None else _role(readers, dtype),
        frozenset(name for reader, _ in readers if (row := row_of(reader)) is not None for name in row.names), dtype,
        granularity, block_size, zeros,
        None if integers is None or not integers.numel() else (int(integers.min()), int(integers.max())), dynamic,
    )


def _dtype(given: dict[str, Any]) -> str:
    """The format of float codes; of integers, the narrowest that holds ``quant_min`` to ``quant_max``."""
    if given.get("dtype") in _FLOATS:
        return _FLOATS[given["dtype"]]
    low, high = given["quant_min"], given["quant_max"]
    if given.get("dtype") is torch.int32:
        return INT32.name
    prefix = "int" if getattr(given.get("dtype"), "is_signed", low < 0) else "uint"
    names = (f"{prefix}{bits}" for bits in BITS)
    fitting = next((name for name in names if _holds(name, low, high)), None)
    if fitting is None:
        raise ExportError(f"a tensor has codes from {low} to {high}, which no {prefix} of {BITS.start} to "
                          f"{BITS.stop - 1} bits holds; give its quantizer the limits of one of these")
    return fitting


def _holds(name: str, low: int, high: int) -> bool:
    return DTYPES[name].minimum <= low and high <= DTYPES[name].maximum


def _role(readers: list[tuple[fx.Node, int]], dtype: str) -> TensorRole:
    rows = [(index, row) for reader, index in readers if (row := row_of(reader)) is not None]
    if dtype != INT32.name and any(index in row.weights for index, row in rows):
        return "weights"
    return "biases" if dtype == INT32.name or any(index == row.bias for index, row in rows) else "constants"
