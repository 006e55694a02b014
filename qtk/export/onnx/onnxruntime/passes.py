"""The rewrites for ONNX Runtime, in their order. To add one, add its line here, with the reason and what comes before.

Each leaves the values of the file as they are; all together they leave a file that they have rewritten as it is. One
that needs operators which the file does not have is not run.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes.common import OutputFixPass, RemoveUnusedNodesPass

from qtk.core.needs import concerned
from qtk.export.onnx.marked_graph import DYNAMIC_LSTM
from qtk.export.onnx.names import ValueNames
from qtk.export.onnx.onnxruntime.concat_inputs import EDGES, read_as_produced, restore_edges
from qtk.export.onnx.onnxruntime.convolution_zeros import drop_zeros_of_convolutions
from qtk.export.onnx.onnxruntime.dynamic_lstms import LSTMS, restore_lstms, write_dynamic_lstms
from qtk.export.onnx.onnxruntime.early_codes import BOUNDING, MOVERS, quantize_products
from qtk.export.onnx.onnxruntime.folded_weights import ELEMENTWISE as FLOAT_BETWEEN_FLOATS
from qtk.export.onnx.onnxruntime.folded_weights import FLOAT_OPERATORS, LOOPS, dequantize_when_loaded
from qtk.export.onnx.onnxruntime.fused_activations import fuse_activations
from qtk.export.onnx.onnxruntime.hard_sigmoids import add_hard_sigmoids
from qtk.export.onnx.onnxruntime.int8_movement import quantize_around_movement
from qtk.export.onnx.onnxruntime.linear_nodes import fuse_linear_layers
from qtk.export.onnx.onnxruntime.moved_codes import CARRIED, NOT_CARRIED, OF_ORDERED_CODES, move_codes
from qtk.export.onnx.onnxruntime.padded_channels import pad_channels
from qtk.export.onnx.onnxruntime.pooled_codes import pool_codes
from qtk.export.onnx.onnxruntime.qdq_barrier import PRODUCTS as WITH_WEIGHTS
from qtk.export.onnx.onnxruntime.qdq_barrier import (
    keep_axis_scales_float,
    keep_float_biases,
    keep_float_weights,
    keep_softmax_float,
)
from qtk.export.onnx.onnxruntime.quantized_scan import carry_codes
from qtk.export.onnx.onnxruntime.repeated_gates import repeat_gates
from qtk.export.onnx.onnxruntime.scalar_ranks import ELEMENTWISE, rank_scalars
from qtk.export.onnx.onnxruntime.separate_weights import separate_weights
from qtk.export.onnx.onnxruntime.stacked_products import PRODUCTS, multiply_stacks, restore_operands
from qtk.export.onnx.onnxruntime.weight_on_right import move_weight_to_rhs
from qtk.export.onnx.onnxruntime.widened_weights import WIDER, widen_weights
from qtk.export.onnx.qdq_nodes import SITES
from qtk.export.onnx.storage_types import BLOCK_OPSET


@dataclass(frozen=True, slots=True)
class FilePurpose:
    """What runs a file.

    Args:
        opset: the operator set of the file.
        int16_sums: whether it may run on x86 without VNNI, in ONNX Runtime's exact mode.
        onnxruntime: whether it is for ONNX Runtime and no other runtime.
        functions: whether what runs it reads functions of the file.
    """

    opset: int
    int16_sums: bool = False
    onnxruntime: bool = False
    functions: bool = True


@dataclass(frozen=True, slots=True)
class Pass:
    """One rewrite.

    Args:
        name: what it does.
        why: what ONNX Runtime does without it.
        seen_in: the versions of ONNX Runtime in which that was seen.
        run: (model, names of its values, opset) → the rewrite, in place.
        needs: the operators that it acts on; a file with none of them stays as it is. Empty: it acts on every file.
        after: the names of the rewrites whose results it reads.
        is_for: what the file is for → whether to run it.
        listed_as: the key in the metadata ``qtk.sites`` of the nodes that leave the file with it; ``None``: none do.
        restore: adds the nodes that left the file with it, for readers.
    """

    name: str
    why: str
    seen_in: str
    run: Callable[[ir.Model, ValueNames, int], None]
    needs: frozenset[object] = frozenset()
    after: tuple[str, ...] = ()
    is_for: Callable[[FilePurpose], bool] = lambda purpose: True
    listed_as: str | None = None
    restore: Callable[[ir.Model], None] = lambda model: None


def _of_graph(rewrite: Callable[[ir.Graph, ValueNames], None]) -> Callable[[ir.Model, ValueNames, int], None]:
    return lambda model, names, opset: rewrite(model.graph, names)


def _of_model(rewrite: Callable[[ir.Model], None]) -> Callable[[ir.Model, ValueNames, int], None]:
    return lambda model, names, opset: rewrite(model)


def remove_unused(model: ir.Model) -> None:
    """Removes nodes and initializers that nothing reads; an input that is an output goes through Identity. In place."""
    RemoveUnusedNodesPass()(model)
    OutputFixPass()(model)


def _any_of(*operators: str) -> frozenset[object]:
    return frozenset(operators)


BEFORE_SITES_ARE_LISTED = (
    Pass("carry_codes", "a Scan takes and returns floats, and its products compute in float", "1.31",
         _of_graph(carry_codes), _any_of("Scan")),
    Pass("quantize_products", "products in front of movement or of bounds compute in float", "1.32",
         _of_graph(quantize_products), _any_of(*MOVERS, *BOUNDING), is_for=lambda purpose: purpose.onnxruntime),
    Pass("move_codes", "products behind Gather, Split, Expand, Pad and Concat compute in float", "1.31",
         _of_graph(move_codes), _any_of(*NOT_CARRIED, "Shape"), after=("carry_codes",)),
    Pass("move_resized_codes", "products behind Resize, Tile, GatherND, GatherElements and ReduceMax compute in float",
         "1.32", lambda model, names, opset: move_codes(model.graph, names, OF_ORDERED_CODES),
         _any_of(*OF_ORDERED_CODES), after=("move_codes",), is_for=lambda purpose: purpose.onnxruntime),
    Pass("pool_codes", "ReduceMean has no integer kernel", "1.31", _of_graph(pool_codes), _any_of("ReduceMean")),
    Pass("add_hard_sigmoids", "HardSigmoid has no integer kernel", "1.31", _of_graph(add_hard_sigmoids),
         _any_of("HardSigmoid")),
    Pass("move_weight_to_rhs", "products with a stored left factor, and Einsum, compute in float", "1.31",
         _of_graph(move_weight_to_rhs), _any_of("MatMul", "Einsum")),
    Pass("fuse_linear_layers", "Gemm of a float or a dynamically quantized value computes in float", "1.31",
         _of_graph(fuse_linear_layers), _any_of("Gemm", "MatMul", "Transpose"), after=("move_weight_to_rhs",)),
    Pass("fuse_activations", "GELU and SiLU between codes stay several operators", "1.31", _of_graph(fuse_activations),
         _any_of("Erf", "Sigmoid")),
    Pass("keep_softmax_float", "QLinearSoftmax computes other codes", "1.31, 1.32", _of_graph(keep_softmax_float),
         _any_of("Softmax")),
    Pass("rank_scalars", "integer kernels take a scalar one element at a time", "1.32", _of_graph(rank_scalars),
         _any_of(*ELEMENTWISE), after=("add_hard_sigmoids",)),
    Pass("keep_float_weights", "float weights between codes are rounded to 8 bits", "1.32",
         _of_graph(keep_float_weights), _any_of(*WITH_WEIGHTS)),
    Pass("keep_float_biases", "float biases of products without integer kernels are rounded", "1.32",
         _of_graph(keep_float_biases), _any_of(*WITH_WEIGHTS)),
    Pass("keep_axis_scales_float", "operators between codes with scales of an axis fail or take one scale", "1.32",
         _of_graph(keep_axis_scales_float)),
    Pass("quantize_around_movement", "the optimized graph of int8 values is refused", "1.31",
         _of_graph(quantize_around_movement), _any_of(*CARRIED), after=("move_codes",),
         is_for=lambda purpose: purpose.opset >= BLOCK_OPSET),
    Pass("drop_zeros_of_convolutions", "files of many small weights are larger", "1.32",
         lambda model, names, opset: drop_zeros_of_convolutions(model.graph), _any_of("Conv")),
    Pass("pad_channels", "integer convolutions of 1 to 3 channels take up to 1.8 times as long", "1.32",
         _of_graph(pad_channels), _any_of("Conv"), after=("move_codes", "drop_zeros_of_convolutions"),
         is_for=lambda purpose: purpose.onnxruntime),
    Pass("repeat_gates", "images are multiplied by gates of channels in runs of that many values", "1.32",
         _of_graph(repeat_gates), _any_of("Mul"), after=("pool_codes", "add_hard_sigmoids"),
         is_for=lambda purpose: purpose.onnxruntime),
    Pass("widen_weights", "products of weights of 4 bits compute in float", "1.32", _of_graph(widen_weights),
         frozenset(WIDER), after=("keep_float_biases", "drop_zeros_of_convolutions"),
         is_for=lambda purpose: purpose.onnxruntime),
    Pass("remove_unused", "what the rewrites above replaced stays in the file", "all", _of_model(remove_unused)),
    Pass("dequantize_when_loaded", "weights of float operators are dequantized at every run", "1.31",
         lambda model, names, opset: dequantize_when_loaded(model, opset=opset),
         _any_of(*FLOAT_OPERATORS, *FLOAT_BETWEEN_FLOATS, *LOOPS), after=("remove_unused",),
         is_for=lambda purpose: purpose.functions),
)
"""Rewrites that know sites by the metadata of DequantizeLinear nodes."""

AFTER_SITES_ARE_LISTED = (
    Pass("write_dynamic_lstms", "there is no other operator that stands for qtk's until then", "1.32",
         _of_model(write_dynamic_lstms), _any_of(DYNAMIC_LSTM), listed_as=LSTMS, restore=restore_lstms),
    Pass("multiply_stacks", "products of stacks of matrices compute in float", "1.32", _of_model(multiply_stacks),
         _any_of("block_size"), listed_as=PRODUCTS, restore=restore_operands),
    Pass("read_as_produced", "each input of QLinearConcat is rounded twice", "1.31", _of_model(read_as_produced),
         _any_of("Concat"), listed_as=EDGES, restore=restore_edges),
    Pass("separate_weights", "the exact mode refuses the file", "1.32", _of_model(separate_weights),
         after=("multiply_stacks",), is_for=lambda purpose: purpose.int16_sums),
)
"""Rewrites that add to the list of sites in the metadata of the file what readers of it need."""


def run_passes(
    passes: tuple[Pass, ...], model: ir.Model, names: ValueNames, purpose: FilePurpose
) -> None:
    """Runs every pass of ``passes`` that is for such a file and concerns it, in order. In place."""
    own = [each for each in passes if each.is_for(purpose)]
    for each in concerned(own, lambda: file_contents(model)):
        each.run(model, names, purpose.opset)


def file_contents(model: ir.Model) -> set[object]:
    """The operators of a file, sizes and conditions left out, attributes, and types of values."""
    nodes = list(model.graph.all_nodes())
    operators = {node.op_type for node in nodes if node.op_type in (*LOOPS, "Shape") or not _computes_sizes(node)}
    made = [value for node in nodes for value in node.outputs]
    values = (*model.graph.inputs, *model.graph.initializers.values(), *made)
    return {*operators, *(name for node in nodes for name in node.attributes), *(value.dtype for value in values)}


def _computes_sizes(node: ir.Node) -> bool:
    """Says whether a node makes integers of 64 bits or conditions, by its results, else by what it reads."""
    kinds = {value.dtype for value in node.outputs} - {None} or {value.dtype for value in node.inputs if value}
    return bool(kinds) and kinds <= {ir.DataType.INT64, ir.DataType.BOOL}


def restore_nodes(model: ir.Model) -> None:
    """Adds the nodes that left a file with the rewrites after its sites were listed; nothing reads them. In place."""
    listed = json.loads(model.metadata_props.get(SITES, "{}"))
    for each in AFTER_SITES_ARE_LISTED:
        if each.listed_as in listed:
            each.restore(model)
