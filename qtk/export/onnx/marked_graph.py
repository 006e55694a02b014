"""Exports a simulated model to ONNX with one marker node for every quantized value.

Each quantizer is replaced by an opaque op with the name of its site, which torch's exporter translates one to one;
``qdq_nodes`` then replaces these markers by QuantizeLinear and DequantizeLinear.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx
import onnx_ir as ir
import torch
from onnx_ir.passes.common import ClearMetadataAndDocStringPass, IdentityEliminationPass
from onnxscript import optimizer, values
from onnxscript.rewriter import RewritePass
from onnxscript.rewriter.rules.common import mul_by_1_rule
from torch import Tensor, fx
from torch.export import Dim

from qtk.calls.calls import Call
from qtk.calls.inputs import ExampleInputs, input_leaves, split_inputs
from qtk.calls.signature import input_names
from qtk.capture.composites import Composite, composite_called
from qtk.capture.packed import PackedRecurrent
from qtk.capture.recurrent_tracing import lengths_stay_free
from qtk.capture.torch_export import silent_torch
from qtk.core.dtypes import INT32
from qtk.core.granularity import PerToken, PerTokenBlock
from qtk.core.needs import found_where
from qtk.errors import ExportError
from qtk.export.file_signature import file_signature
from qtk.export.free_axes import (
    EqualAxes,
    doubled,
    equal_axes,
    file_axes,
    warn_of_fixed_axes,
    warn_of_written_values,
)
from qtk.export.onnx.complex_ops import check_signature, write_parts
from qtk.export.onnx.decompositions import decompose_where_needed, write_decomposed
from qtk.export.onnx.folded_constants import with_constants
from qtk.export.onnx.grouped_matmul import grouped_matmul_translations
from qtk.export.onnx.names import name_nodes
from qtk.export.onnx.onnxruntime.flat_linears import flatten_linears
from qtk.export.onnx.op_translations import TRANSLATIONS, widen_indices
from qtk.export.onnx.outer_outputs import return_own_values
from qtk.export.onnx.padded_sequences import pad_sequences
from qtk.export.onnx.sequence_lengths import PADDED_KERNELS
from qtk.export.onnx.sequence_lengths import TRANSLATIONS as OF_LENGTHS
from qtk.export.onnx.site_markers import SITE_MARKER
from qtk.export.onnx.sorted_sequences import drop_sorting
from qtk.export.onnx.step_operators import ONE_OPERATOR, step_operators
from qtk.export.onnx.untranslated_ops import UntranslatedError, export_error, translation_error
from qtk.export.simulated_sites import SimulatedSite
from qtk.graph.graphs import graphs, nested_graphs
from qtk.graph.insert import QUANTIZERS, quantizer_nodes
from qtk.graph.written_buffers import buffer_values, is_write, written_buffers
from qtk.nn.eval_mode import evaluating
from qtk.nn.recurrent import Recurrent, RecurrentCell
from qtk.nn.tap import Tap
from qtk.operators.contents import Trait, contents
from qtk.operators.targets import packed_call
from qtk.ops.pack_padded import pack_padded
from qtk.report.stages import Begin, unseen
from qtk.torch_private import onnx_translations_kept, pytree

DOMAIN, MARKER, DYNAMIC_LSTM = "qtk", "FakeQuantize", "DynamicLSTM"
"""Of the operators that stand for others until a file is complete."""

_TRANSLATED = torch.ops.aten.lstm.input, torch.ops.aten.gru.input


@dataclass(frozen=True, slots=True)
class MarkedGraph:
    """An ONNX graph with markers, and the model's names of its inputs and outputs.

    Args:
        model: the graph; the node ``qtk::FakeQuantize`` with attribute ``site`` marks a quantized value.
        input_names: names of the tensors the model takes, in order.
        output_names: names of the tensors it returns, in order.
        equal_axes: (input, axis) pairs of one length each, and the name of the length where it has one.
    """

    model: ir.Model
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    equal_axes: tuple[EqualAxes, ...] = ()


def trace(
    model: fx.GraphModule,
    sites: Iterable[SimulatedSite],
    example_inputs: ExampleInputs | Call,
    *,
    opset: int,
    contrib_operators: bool = False,
    begin: Begin = unseen,
) -> MarkedGraph:
    """Exports ``model`` in eval mode with a marker for each of ``sites``; the model is not changed.

    What parameters alone decide is stored where ONNX has no operators for it (``with_constants``).
    Dimensions that are symbolic in the prepared graph stay dynamic. The buffers that it writes are inputs and outputs.
    With ``contrib_operators``, layers of recurrent nets that ONNX Runtime has an operator of its own for are nodes
    ``qtk::DynamicLSTM`` (``dynamic_lstms``).

    Raises: ExportError if torch cannot export the graph, or not to this opset, activations are in blocks, or an input,
        an output or a state is complex; CaptureError if the inputs are not nested as in the call the model was prepared
        with.
    """
    begin("capturing")
    sites = list(sites)
    blocks = next((site for site in sites if isinstance(site.spec.granularity, PerTokenBlock)), None)
    if blocks is not None:
        raise ExportError(f"{blocks.name} is {blocks.spec}: ONNX has no operators for activations in blocks; export "
                          "formats=('encodings',), or linear layers as 'compressed_tensors'")
    _check_padding(model, sites)
    signature = file_signature(model)
    check_signature(signature)
    with evaluating(model), silent_torch(), torch.no_grad():
        flat = _marked(model, {site.node: site for site in sites}, contrib_operators=contrib_operators)
        free = model.free_axes if isinstance(model, PackedRecurrent) else {}
        leaves = input_leaves(model.graph, *split_inputs(example_inputs))
        given = [*leaves, *buffer_values(model).values()]
        program = _export(flat, given, free)
        begin("translating")
        try:
            graph = _translate(program, opset)
        except UntranslatedError as error:
            folded = with_constants(flat, error.sites, {site.name: site.quantizer for site in sites})
            if folded is None:
                raise
            program = _export(folded, given, free)
            graph = _translate(program, opset)
    if not free:
        warn_of_fixed_axes(model.graph, program)
    warn_of_written_values(model)
    names = [*input_names(model), *(name for name, _ in signature.buffers.values())]
    return MarkedGraph(graph, _input_names(names, program, graph), tuple(signature.outputs), equal_axes(model))


def _marked(
    model: fx.GraphModule, sites: Mapping[fx.Node, SimulatedSite], *, contrib_operators: bool
) -> fx.GraphModule:
    """A graph module with the same parameters, flat inputs, tensors as flat outputs, and markers instead of quantizers.

    Quantizers that are not in ``sites`` are removed.
    """
    graph = copy.deepcopy(model.graph)
    graph.set_codegen(fx.graph.CodeGen())
    node_in_copy = dict(zip(model.graph.nodes, graph.nodes, strict=True))
    held = contents(model.graph.nodes) | {site.spec.dtype for site in sites.values()}
    found_where({INT32}, held, lambda: flatten_linears(model.graph, graph), None)
    output = graph.output_node()
    given, written = (pytree.tree_leaves(each.args[0]) for each in (model.graph.output_node(), output))
    output.args = (tuple(value for leaf, value in zip(given, written, strict=True) if isinstance(leaf, fx.Node)
                         and isinstance(leaf.meta.get("val"), Tensor)),)
    _mark_sites(model, node_in_copy, sites)
    write_decomposed(graph)
    write_parts(graph)
    found_where({Trait.WRITES}, held, lambda: _pass_buffers(graph), None)
    flat = fx.GraphModule(model, graph)
    if Trait.COMPOSITES in held:
        _mark_composites(model, flat, sites, contrib_operators=contrib_operators)
    if any(node.target is pack_padded or packed_call(node) for node in flat.graph.nodes):
        followed = {site.name for site in sites.values() if _is_by_element(site)}
        drop_sorting(flat.graph, followed)
        pad_sequences(flat, followed)
    return flat


def _mark_composites(
    model: fx.GraphModule, flat: fx.GraphModule, sites: Mapping[fx.Node, SimulatedSite], *, contrib_operators: bool
) -> None:
    """Gives ``flat`` copies of the composites of ``model``, with markers inside. Changes ``flat``."""
    for node in model.graph.nodes:
        composite = composite_called(node)
        if composite is None:
            continue
        copied = _marked_composite(composite, sites)
        if isinstance(copied, Recurrent):
            copied.over_time = step_operators(node, copied, sites, contrib_operators=contrib_operators)
            copied.packed_kernel = PADDED_KERNELS.get(copied.kind)
        elif isinstance(copied, RecurrentCell) and contrib_operators and copied.kind in ONE_OPERATOR:
            copied.over_time = step_operators(node, copied, sites, contrib_operators=True)
            copied.add_module("active_tap", _ActiveTap())
        flat.set_submodule(str(node.target), copied)


def _pass_buffers(graph: fx.Graph) -> None:
    """Makes the buffers that a graph writes inputs and outputs, behind all others. Changes ``graph``."""
    output, buffers = graph.output_node(), written_buffers(graph).values()
    output.args = ((*output.args[0], *(buffer.value for buffer in buffers)),)  # type: ignore[misc]
    for node in [node for node in graph.nodes if is_write(node)]:
        graph.erase_node(node)
    inputs = list(graph.find_nodes(op="placeholder"))
    for index, buffer in enumerate(buffers):
        inputs.append(graph.placeholder(f"qtk_buffer_{index}"))
        inputs[-1].meta = dict(buffer.held.meta)
        if buffer.read is not None:
            buffer.read.replace_all_uses_with(inputs[-1])
            graph.erase_node(buffer.read)
        graph.erase_node(buffer.held)
    for node in reversed(inputs):
        next(iter(graph.nodes)).prepend(node)


def _marked_composite(module: Composite, sites: Mapping[fx.Node, SimulatedSite]) -> Composite:
    """A copy with markers inside; a composite without markers is exported as one op.

    torch's exporter has no ONNX operator for plain RNNs, and drops the projections of LSTMs.
    """
    copied = copy.deepcopy(module)
    has_markers = False
    for before, after in zip(graphs(module).values(), graphs(copied).values(), strict=True):
        has_markers |= _mark_sites(before, dict(zip(before.graph.nodes, after.graph.nodes, strict=True)), sites)
        after.delete_submodule(QUANTIZERS)
        after.recompile()
    if has_markers or (isinstance(module, Recurrent) and not _is_one_operator(module)):
        copied.add_module("active_tap", _ActiveTap())
    return copied


def _is_one_operator(module: Recurrent) -> bool:
    return module.kind in ONE_OPERATOR and not module.projected


class _ActiveTap(Tap):
    """A tap that is never idle: with it, a composite runs its submodules instead of the fused kernel."""

    idle = False


def _mark_sites(
    module: fx.GraphModule, node_in_copy: Mapping[fx.Node, fx.Node], sites: Mapping[fx.Node, SimulatedSite]
) -> bool:
    """Replaces the quantizers in a copy of the graph of ``module`` by markers; quantizers not in ``sites`` go.

    Returns: whether there are any markers.
    """
    calls = quantizer_nodes(module)
    for call in calls:
        node = node_in_copy[call]
        copied = node.graph
        (replacement,) = node.args
        assert isinstance(replacement, fx.Node)
        if call in sites:
            with copied.inserting_before(node):
                marked = (replacement, sites[call].name)
                replacement = copied.call_function(SITE_MARKER, marked)
        node.replace_all_uses_with(replacement)
        copied.erase_node(node)
    return any(call in sites for call in calls)


def _check_padding(model: fx.GraphModule, sites: Iterable[SimulatedSite]) -> None:
    """Raises: ExportError naming a site in a net on packed sequences whose dynamic range would include padding."""
    inside = {graph.graph for node in model.graph.nodes if packed_call(node) for graph in nested_graphs(node).values()}
    for site in sites:
        if site.node.graph in inside and not _is_by_element(site):
            raise ExportError(
                f"{site.name}: packed sequences are padded in ONNX, and dynamic quantization of a whole tensor would "
                "include the padding; quantize this site per token or statically, or export formats=('encodings',)"
            )


def _is_by_element(site: SimulatedSite) -> bool:
    """Says whether the codes of an element of a sequence do not depend on others."""
    return isinstance(site.spec.granularity, PerToken) or not site.spec.dynamic


def _export(
    flat: fx.GraphModule, leaves: list[object], free: Mapping[str, list[int]]
) -> torch.export.ExportedProgram:
    placeholders = flat.graph.find_nodes(op="placeholder")
    axes = [free.get(str(node.target), file_axes(node)) for node in placeholders]
    examples = tuple(doubled(leaf, each) for leaf, each in zip(leaves, axes, strict=True))
    shapes = tuple(dict.fromkeys(each, Dim.AUTO) or None for each in axes)
    try:
        with lengths_stay_free():
            return torch.export.export(flat, examples, dynamic_shapes=shapes)
    except Exception as error:
        raise export_error(error, "torch.export cannot capture the simulation") from error


def _translate(program: torch.export.ExportedProgram, opset: int) -> ir.Model:
    table: dict[Callable[..., object], Callable[..., object]] = {
        SITE_MARKER: _mark, torch.ops.qtk.dynamic_lstm.default: _dynamic_lstm,
        **TRANSLATIONS, **OF_LENGTHS,
    }
    of_groups: Mapping[Callable[..., object], Callable[..., object]] = found_where(
        {"grouped_matmul"}, contents(program.graph.nodes), lambda: grouped_matmul_translations(program), {})
    table |= of_groups
    decomposed = decompose_where_needed(program)
    try:
        with onnx_translations_kept(), lengths_stay_free(_TRANSLATED):
            exported = torch.onnx.export(
                program, dynamo=True, opset_version=opset, custom_translation_table=table, optimize=False, verbose=False
            )
    except Exception as error:
        with onnx_translations_kept():
            raise translation_error(error, program, decomposed[0], table, opset) from error
    assert exported is not None
    graph: ir.Model = exported.model
    if graph.opset_imports.get("") != opset:
        raise ExportError(f"the model cannot be converted to ONNX opset {opset}, it stayed at "
                          f"{graph.opset_imports.get('')}; choose another opset")
    name_nodes(graph)
    # onnxscript's folding fails at a split into chunks of a dynamic size; such a graph is not folded
    with contextlib.suppress(RuntimeError):
        optimizer.fold_constants(graph)
    operators = {node.op_type for node in graph.graph.all_nodes()}
    found_where({"ScatterND", "GatherND"}, operators, lambda: widen_indices(graph.graph), None)
    RewritePass(_MULTIPLIED_BY_ONE)(graph)
    IdentityEliminationPass()(graph)
    return_own_values(graph.graph)
    ClearMetadataAndDocStringPass()(graph)
    return graph


def _input_names(
    prepared_names: Sequence[str], program: torch.export.ExportedProgram, graph: ir.Model
) -> tuple[str, ...]:
    """Names of the inputs in the prepared model; torch's exporter names them after the exported program."""
    program_names = [node.name for node in program.graph.find_nodes(op="placeholder")]
    inputs_of_program = program_names[len(program_names) - len(prepared_names):]  # parameters come before
    prepared_name = dict(zip(inputs_of_program, prepared_names, strict=True))
    return tuple(prepared_name[str(value.name)] for value in graph.graph.inputs)


def _mark(value: object, site: str) -> object:
    return values.Op(values.Opset(DOMAIN, 1), MARKER, _SCHEMA)(value, site=site)


def _dynamic_lstm(
    x: object, hidden: object, cell: object, w_ih: object, w_hh: object, b_ih: object, b_hh: object, backwards: bool
) -> object:
    inputs = (x, hidden, cell, w_ih, w_hh, b_ih, b_hh)
    return values.Op(values.Opset(DOMAIN, 1), DYNAMIC_LSTM, _LSTM_SCHEMA)(*inputs, backwards=int(backwards))


def _schema(
    name: str, inputs: Sequence[str], results: Sequence[str], attribute: onnx.defs.OpSchema.Attribute
) -> onnx.defs.OpSchema:
    """The schema of an operator on floats; inputs whose name ends with ``?`` are optional."""
    schema = onnx.defs.OpSchema
    option = {False: schema.FormalParameterOption.Single, True: schema.FormalParameterOption.Optional}
    return schema(
        name,
        DOMAIN,
        1,
        inputs=[schema.FormalParameter(each.rstrip("?"), "T", param_option=option[each.endswith("?")])
                for each in inputs],
        outputs=[schema.FormalParameter(each, "T") for each in results],
        type_constraints=[("T", ["tensor(float)", "tensor(float16)", "tensor(bfloat16)", "tensor(double)"], "")],
        attributes=[attribute],
    )


_OF = onnx.defs.OpSchema
_SCHEMA = _schema(MARKER, ["value"], ["result"], _OF.Attribute("site", _OF.AttrType.STRING))
_LSTM_SCHEMA = _schema(
    DYNAMIC_LSTM, ["x", "hidden", "cell", "w_ih", "w_hh", "b_ih?", "b_hh?"], ["output", "last_hidden", "last_cell"],
    _OF.Attribute("backwards", _OF.AttrType.INT),
)
_MULTIPLIED_BY_ONE = mul_by_1_rule.commute()
"""``addcmul`` is translated to a product with its factor, which is 1."""
