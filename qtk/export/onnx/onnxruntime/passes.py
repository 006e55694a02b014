"""The rewrites for ONNX Runtime, in their order. To add one, add its line here, with the reason and what comes before.

Each leaves the values of the file as they are; all together they leave a file that they have rewritten as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes.common import OutputFixPass, RemoveUnusedNodesPass

from qtk.export.onnx.onnxruntime.axis_scales import keep_axis_scales_float
from qtk.export.onnx.onnxruntime.concat_inputs import read_as_produced
from qtk.export.onnx.onnxruntime.convolution_zeros import drop_zeros_of_convolutions
from qtk.export.onnx.onnxruntime.float_biases import keep_float_biases
from qtk.export.onnx.onnxruntime.float_softmax import keep_softmax_float
from qtk.export.onnx.onnxruntime.float_weights import keep_float_weights
from qtk.export.onnx.onnxruntime.folded_weights import dequantize_when_loaded
from qtk.export.onnx.onnxruntime.fused_activations import fuse_activations
from qtk.export.onnx.onnxruntime.hard_sigmoids import add_hard_sigmoids
from qtk.export.onnx.onnxruntime.int8_movement import quantize_around_movement
from qtk.export.onnx.onnxruntime.linear_nodes import fuse_linear_layers
from qtk.export.onnx.onnxruntime.moved_codes import move_codes
from qtk.export.onnx.onnxruntime.pooled_codes import pool_codes
from qtk.export.onnx.onnxruntime.quantized_scan import carry_codes
from qtk.export.onnx.onnxruntime.right_weights import put_weights_right
from qtk.export.onnx.onnxruntime.scalar_ranks import rank_scalars
from qtk.export.onnx.onnxruntime.separate_weights import separate_weights
from qtk.export.onnx.onnxruntime.stacked_products import multiply_stacks
from qtk.export.onnx.storage_types import BLOCK_OPSET
from qtk.export.onnx.value_names import ValueNames


@dataclass(frozen=True, slots=True)
class Pass:
    """One rewrite.

    Args:
        name: what it does.
        why: what ONNX Runtime does without it.
        seen_in: the versions of ONNX Runtime in which that was seen.
        run: (model, names of its values, opset) → the rewrite, in place.
        after: the names of the rewrites whose results it reads.
        is_for: (opset, whether the file may run on x86 without VNNI, in ONNX Runtime's exact mode) → whether to run it.
    """

    name: str
    why: str
    seen_in: str
    run: Callable[[ir.Model, ValueNames, int], None]
    after: tuple[str, ...] = ()
    is_for: Callable[[int, bool], bool] = lambda opset, int16_sums: True


def _of_graph(rewrite: Callable[[ir.Graph, ValueNames], None]) -> Callable[[ir.Model, ValueNames, int], None]:
    return lambda model, names, opset: rewrite(model.graph, names)


def _of_model(rewrite: Callable[[ir.Model], None]) -> Callable[[ir.Model, ValueNames, int], None]:
    return lambda model, names, opset: rewrite(model)


def remove_unused(model: ir.Model) -> None:
    """Removes nodes and initializers that nothing reads; an input that is an output goes through Identity. In place."""
    RemoveUnusedNodesPass()(model)
    OutputFixPass()(model)


BEFORE_SITES_ARE_LISTED = (
    Pass("carry_codes", "a Scan takes and returns floats, and its products compute in float", "1.31",
         _of_graph(carry_codes)),
    Pass("move_codes", "products behind Gather, Split, Expand, Pad and Concat compute in float", "1.31",
         _of_graph(move_codes), after=("carry_codes",)),
    Pass("pool_codes", "ReduceMean has no integer kernel", "1.31", _of_graph(pool_codes)),
    Pass("add_hard_sigmoids", "HardSigmoid has no integer kernel", "1.31", _of_graph(add_hard_sigmoids)),
    Pass("put_weights_right", "products with a stored left factor, and Einsum, compute in float", "1.31",
         _of_graph(put_weights_right)),
    Pass("fuse_linear_layers", "Gemm of a float or a dynamically quantized value computes in float", "1.31",
         _of_graph(fuse_linear_layers), after=("put_weights_right",)),
    Pass("fuse_activations", "GELU and SiLU between codes stay several operators", "1.31", _of_graph(fuse_activations)),
    Pass("keep_softmax_float", "QLinearSoftmax computes other codes", "1.31, 1.32", _of_graph(keep_softmax_float)),
    Pass("rank_scalars", "integer kernels take a scalar one element at a time", "1.32", _of_graph(rank_scalars),
         after=("add_hard_sigmoids",)),
    Pass("keep_float_weights", "float weights between codes are rounded to 8 bits", "1.32",
         _of_graph(keep_float_weights)),
    Pass("keep_float_biases", "float biases of products without integer kernels are rounded", "1.32",
         _of_graph(keep_float_biases)),
    Pass("keep_axis_scales_float", "operators between codes with scales of an axis fail or take one scale", "1.32",
         _of_graph(keep_axis_scales_float)),
    Pass("quantize_around_movement", "the optimized graph of int8 values is refused", "1.31",
         _of_graph(quantize_around_movement), after=("move_codes",),
         is_for=lambda opset, int16_sums: opset >= BLOCK_OPSET),
    Pass("drop_zeros_of_convolutions", "files of many small weights are larger", "1.32",
         lambda model, names, opset: drop_zeros_of_convolutions(model.graph)),
    Pass("remove_unused", "what the rewrites above replaced stays in the file", "all", _of_model(remove_unused)),
    Pass("dequantize_when_loaded", "weights of float operators are dequantized at every run", "1.31",
         lambda model, names, opset: dequantize_when_loaded(model, opset=opset), after=("remove_unused",)),
)
"""Rewrites that know sites by the metadata of DequantizeLinear nodes."""

AFTER_SITES_ARE_LISTED = (
    Pass("multiply_stacks", "products of stacks of matrices compute in float", "1.32", _of_model(multiply_stacks)),
    Pass("read_as_produced", "each input of QLinearConcat is rounded twice", "1.31", _of_model(read_as_produced)),
    Pass("separate_weights", "the exact mode refuses the file", "1.32", _of_model(separate_weights),
         after=("multiply_stacks",), is_for=lambda opset, int16_sums: int16_sums),
)
"""Rewrites that add to the list of sites in the metadata of the file what readers of it need."""


def run_passes(
    passes: tuple[Pass, ...], model: ir.Model, names: ValueNames, *, opset: int, int16_sums: bool = False
) -> None:
    """Runs those of ``passes`` that are for such a file, in their order. In place."""
    for each in passes:
        if each.is_for(opset, int16_sums):
            each.run(model, names, opset)
