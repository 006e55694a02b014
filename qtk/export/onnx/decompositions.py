"""Spares torch's exporter the second trace of a program in which it has nothing to decompose.

``torch.onnx.export`` traces every program again to decompose operators that it has no translation of: 44 % of the time
of an export (mobilenetv3_small_050, vit_tiny_patch16_224; torch 2.14). Two operators that most image models hold are
written as what they would become, so that mostly nothing is left to decompose.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from qtk.export.onnx.adaptive_pools import ADAPTIVE_POOLS
from qtk.export.onnx.complex_ops import DECOMPOSED
from qtk.export.onnx.free_numbers import free_number_table, reads_free_number
from qtk.export.onnx.further_decompositions import FURTHER
from qtk.export.onnx.scattered_values import SCATTERS, is_scattered_wrongly
from qtk.export.onnx.untranslated_ops import is_complex, nodes_of
from qtk.graph.sites import is_float

Table = Mapping[Callable[..., object], object]
"""Operator → what it is decomposed into."""

_ATEN = torch.ops.aten
SQUEEZES = frozenset((_ATEN.squeeze.dim, _ATEN.squeeze.dims))

TRANSLATED = frozenset((
    operator.getitem, _ATEN.conv2d.default, _ATEN.gru.input, _ATEN.hardsigmoid.default, _ATEN.layer_norm.default,
    _ATEN.linear.default, _ATEN.lstm.input, _ATEN.matmul.default, _ATEN.reshape.default, _ATEN.softmax.int,
    _ATEN.stack.default, _ATEN.transpose.int, _ATEN.unbind.int, _ATEN.zeros.default,
))
"""Operators outside of torch's core set that its exporter translates without decomposing them."""


def decompose_where_needed(program: ExportedProgram) -> list[ExportedProgram]:
    """Lets ``program.run_decompositions(table)`` return the program itself if none of its operators is in the table.

    ``FURTHER`` and ``ADAPTIVE_POOLS`` belong to each table, ``DECOMPOSED`` where a program holds complex numbers,
    ``SCATTERS`` where it holds one that is translated wrongly, ``FREE_NUMBERS`` where an operator reads such a number.

    Returns: a list of the program that was returned last.
    """
    returned = [program]
    program.run_decompositions = partial(_decomposed, program, returned)
    return returned


def write_decomposed(graph: fx.Graph) -> None:
    """Writes pooling of an image to one value as mean, and flatten as reshape. In place.

    Also what torch's exporter (2.14) translates wrongly, or not: ``squeeze`` of an axis that is not 1, which does
    nothing in torch, and a float number less integers.
    """
    for node in list(graph.nodes):
        if node.target is _ATEN.adaptive_avg_pool2d.default and list(node.args[1]) == [1, 1]:
            with graph.inserting_before(node):
                _replace(node, graph.call_function(_ATEN.mean.dim, (node.args[0], [-1, -2], True)))
        elif node.target is _ATEN.flatten.using_ints and (sizes := _lengths(node)) is not None:
            with graph.inserting_before(node):
                _replace(node, graph.call_function(_ATEN.reshape.default, (node.args[0], sizes)))
        elif node.target in SQUEEZES:
            axes = _axes_of_one(node)
            function, arguments = (_ATEN.squeeze.dims, [axes]) if axes else (_ATEN.clone.default, [])
            with graph.inserting_before(node):
                _replace(node, graph.call_function(function, (node.args[0], *arguments)))
        elif node.target is _ATEN.rsub.Scalar and not is_float(node.args[0]) and is_float(node):
            with graph.inserting_before(node):
                operand = graph.call_function(_ATEN.to.dtype, (node.args[0], node.meta["val"].dtype))
            operand.meta["val"] = node.meta["val"]
            node.replace_input_with(node.args[0], operand)


def _axes_of_one(node: fx.Node) -> list[int]:
    """The axes of length 1 that a ``squeeze`` removes."""
    source, axes = node.args
    assert isinstance(source, fx.Node)
    while "val" not in source.meta:  # marks of sites
        (source,) = source.all_input_nodes
    lengths = source.meta["val"].shape
    named = axes if isinstance(axes, (list, tuple)) else [axes]
    return [axis for axis in named if isinstance(axis, int) and isinstance(lengths[axis], int) and lengths[axis] == 1]


def _lengths(node: fx.Node) -> list[fx.Node | int] | None:
    """The lengths of what a node flattens; ``None`` if they are free behind the first of the flattened axes."""
    (value, start, *_), result = (*node.args, 0), node.meta.get("val")
    if not isinstance(start, int) or start < 1 or not isinstance(result, Tensor):
        return None
    if any(isinstance(length, torch.SymInt) for length in result.shape[start:]):
        return None
    with node.graph.inserting_before(node):
        return [node.graph.call_function(_ATEN.sym_size.int, (value, axis)) if isinstance(length, torch.SymInt)
                else length for axis, length in enumerate(result.shape)]


def _replace(node: fx.Node, other: fx.Node) -> None:
    other.meta = dict(node.meta)
    node.replace_all_uses_with(other)
    node.graph.erase_node(node)


def _decomposed(
    program: ExportedProgram, returned: list[ExportedProgram], table: Table | None = None, **options: bool
) -> ExportedProgram:
    if table is not None:
        table = {**table, **FURTHER, **ADAPTIVE_POOLS,
                 **(DECOMPOSED if any(map(is_complex, nodes_of(program))) else {}),
                 **(SCATTERS if any(map(is_scattered_wrongly, nodes_of(program))) else {}),
                 **(free_number_table(table) if any(map(reads_free_number, nodes_of(program))) else {})}
    if table is None or options or any(map(partial(_is_decomposed, table), nodes_of(program))):
        returned[0] = ExportedProgram.run_decompositions(program, table, **options)
    return returned[0]


def _is_decomposed(table: Table, node: fx.Node) -> bool:
    """Says whether torch's exporter decomposes an operator, or may, as it does with ``batch_norm``."""
    if node.op != "call_function" or node.target in TRANSLATED or getattr(node.target, "namespace", None) == "qtk":
        return False
    return node.target in table or torch.Tag.core not in getattr(node.target, "tags", ())
