"""Rule 4 of the planner: quantizes parameters, as the ops that read them require."""

from __future__ import annotations

from torch import fx

from qtk.core.dtypes import INT32
from qtk.errors import SpecError
from qtk.graph.op_row import Role
from qtk.graph.sites import Port, edge_site, is_float, ports, value_site
from qtk.planning.draft import Draft, TensorRole
from qtk.planning.patterns import PatternMatch
from qtk.planning.rules import Decision, to_spec


def plan_parameters(draft: Draft) -> None:
    """Decides weights, biases and constant operands of every compute op.

    Requires: values at their producers are decided.
    Ensures: every parameter that a compute op reads as one of these is in ``values`` or ``floats``; the edge to a
    second reader that needs another spec of a weight is in ``edges``; a spec that does not fit the shape is a line of
    ``misfits``.
    """
    for node in draft.graph.nodes:
        row = draft.flow.row(node)
        if row is None or row.role is not Role.COMPUTE or draft.flow.is_static(node):
            continue  # what is computed from parameters alone is a parameter to its reader
        if node in draft.formulas:
            _plan_formula(draft, node, draft.formulas[node])
        else:
            _plan_op(draft, node)


def explain_unread_parameters(draft: Draft) -> None:
    """Records the reason for parameters that stay in float because only ops without a row read them.

    Requires: all other passes have run.
    Ensures: every such parameter is in ``floats``.
    """
    for node in draft.graph.nodes:
        if node.op == "get_attr" and is_float(node) and node not in draft.values:
            reason = draft.unknown_readers(list(draft.flow.readers(node)))
            if reason is not None:
                draft.floats.setdefault(node, reason)


def _plan_op(draft: Draft, node: fx.Node) -> None:
    flow, row = draft.flow, draft.flow.row(node)
    assert row is not None
    decisions = draft.decisions(node)
    for port in flow.weight_ports(node):
        axes = row.weight_axes(node, port.value) if row.weight_axes else None
        _plan_parameter(draft, port, decisions.weight, axes, "weight", row.kind)
    for port in flow.bias_ports(node):
        if flow.is_static(port.value):
            _plan_parameter(draft, port, decisions.bias, None, "bias", row.kind)
    for port in flow.data_ports(node):
        if flow.is_static(port.value) and not draft.divides(port):
            decision = draft.rules.activation if decisions.stream is None else decisions.output
            _plan_constant(draft, port, decision, row.kind)


def _plan_formula(draft: Draft, node: fx.Node, formula: PatternMatch) -> None:
    """Decides the parameters of a formula like those of the op it computes; its numbers stay in float."""
    decisions = draft.decisions(node)
    parameters: tuple[tuple[fx.Node | None, Decision, TensorRole], ...] = (
        (formula.weight, decisions.weight, "weight"), (formula.bias, decisions.bias, "bias")
    )
    for port in ports(node):
        for parameter, decision, role in parameters:
            if parameter is not None and draft.flow.root(port.value) is draft.flow.root(parameter):
                _plan_parameter(draft, port, decision, None, role, formula.kind)


def _plan_constant(draft: Draft, port: Port, decision: Decision, kind: str) -> None:
    """Decides a constant operand like an activation; leaves it in float if activations are dynamic."""
    node = draft.flow.root(port.value)
    if not decision.setting.is_dynamic:
        _plan_parameter(draft, port, decision, None, None, kind)
    elif node not in draft.values:
        draft.floats.setdefault(node, "constant operand; activations are quantized dynamically")


def _plan_parameter(
    draft: Draft, port: Port, decision: Decision, axes: tuple[int, int] | None, role: TensorRole | None, kind: str
) -> None:
    """Decides one parameter.

    Args:
        draft: the plan.
        port: where an op reads it.
        decision: the decision for it.
        axes: output and input channel axes of the value at ``port``, ``None`` without any.
        role: what it is to the op; ``None``: a constant operand.
        kind: of the op.
    """
    node, axes = _quantized_node(draft, port, axes)
    keys = (edge_site(port), node)
    if decision.enabled and decision.setting.dtype == INT32.name:
        return  # rule 13
    if not decision.enabled:
        draft.floats.setdefault(node, f"float by {decision.reason}")
        if role is not None:
            draft.request(role, decision, keys, None)
        return
    shape = tuple(node.meta["val"].shape)
    try:
        spec = to_spec(decision.setting, axes, len(shape), batched=axes is not None and _is_batched(draft, port))
        spec.granularity.qparam_shape(shape)
    except SpecError as error:
        draft.misfits.append(f"{value_site(node)}: {error}")
        return
    wanted = draft.site_plan(spec, decision, f"{role or 'constant operand'} of {kind}", static=True)
    if role is not None:
        draft.request(role, decision, keys, wanted)
    excluded = draft.excluded_reader(node)  # rule 14
    if excluded is not None:
        draft.floats[node], draft.edges[edge_site(port)] = excluded, wanted
        draft.share_edge(port, edge_site(port))
        return
    draft.floats.pop(node, None)
    present = draft.values.setdefault(node, wanted)
    row = draft.flow.row(port.user)
    if present.spec != spec and row is not None and port.arg in row.weights:
        draft.edges[edge_site(port)] = wanted  # a constant operand keeps the encoding it has


def _is_batched(draft: Draft, port: Port) -> bool:
    """Whether the op multiplies with a stack of matrices: experts, heads."""
    row = draft.flow.row(port.user)
    return row is not None and "matmul" in row.names and port.value.meta["val"].ndim > 2


def _quantized_node(
    draft: Draft, port: Port, axes: tuple[int, int] | None
) -> tuple[fx.Node, tuple[int, int] | None]:
    """The parameter read at ``port`` and its channel axes; the value at ``port`` if the axes have none in it."""
    root = draft.flow.root(port.value)
    if root.op != "get_attr":
        return port.value, axes
    if axes is None:
        return root, None
    out, into = (draft.flow.axis_at_root(port.value, axis) for axis in axes)
    return (port.value, axes) if out is None or into is None else (root, (out, into))
