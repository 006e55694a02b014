"""Rule 4 of the planner: quantizes parameters, as the ops that read them require."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from qtk.core.dtypes import INT32
from qtk.core.plan import SitePlan
from qtk.errors import SpecError
from qtk.graph.sites import Port, edge_site, is_float, ports, value_site
from qtk.operators.op_row import Role
from qtk.planning.decision import Decision
from qtk.planning.draft import Draft, TensorRole
from qtk.planning.patterns import PatternMatch
from qtk.planning.rules import to_spec


def plan_parameters(draft: Draft) -> None:
    """Decides weights, biases and constant operands of every compute op.

    A parameter is rounded once. One that its readers want in several formats stays in float, and each reader gets it
    on its edge: a second rounding of rounded values would be on no grid that anybody asked for.

    Requires: values at their producers are decided.
    Ensures: every parameter that a compute op reads as one of these is in ``values`` or ``floats``; the edges to the
    readers of one that is in ``split`` are in ``edges``; a spec that does not fit the shape is a line of ``misfits``.
    """
    values, edges, floats = dict(draft.values), dict(draft.edges), dict(draft.floats)
    requests, misfits = len(draft.requests), len(draft.misfits)
    _plan_ops(draft)
    if draft.split:  # known only now, when some readers have their plans
        draft.values, draft.edges, draft.floats = values, edges, floats
        del draft.requests[requests:], draft.misfits[misfits:]
        _plan_ops(draft)


def _plan_ops(draft: Draft) -> None:
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
        decision = draft.of_parameter(port).weight
        decision = decision if not _multiplies_floats(draft, port) else _with_all_codes(decision)
        _plan_parameter(draft, port, decision, axes, "weight", row.kind)
    for port in flow.bias_ports(node):
        if flow.is_static(port.value):
            _plan_parameter(draft, port, draft.of_parameter(port).bias, None, "bias", row.kind)
    for port in flow.data_ports(node):
        if flow.is_parameter(port.value) and draft.why_float(port) is None and not draft.counts(node):
            stream = decisions.stream
            decision = draft.rules.activation if stream is None else (
                stream.elsewhere if row.multiplies else decisions.output)
            if stream is not None and not decision.enabled:
                draft.split[flow.root(port.value)] = f"float by {decision.reason}; others round it on their edges"
            if stream is None and not row.multiplies and _is_in_float(draft, node):
                draft.floats.setdefault(flow.root(port.value), f"{_name(port)} computes with floats")
            else:
                _plan_constant(draft, port, decision, row.kind)


def _is_in_float(draft: Draft, node: fx.Node) -> bool:
    """Says whether no data that an op reads is quantized, nor inside a supergroup that is computed in integers."""
    values = [draft.flow.root(port.value) for port in draft.flow.data_ports(node)]
    data = [value for value in values if not draft.flow.is_parameter(value)]
    return bool(data) and all(value in draft.floats and value not in draft.groups for value in data)


def _multiplies_floats(draft: Draft, port: Port) -> bool:
    """Says whether a weight belongs to a layer of a recurrent net that computes in float."""
    inside, weights = draft.nested.get(port.user, ()), port.user.args[port.arg]
    if port.item is None or not inside or not isinstance(weights, (list, tuple)):
        return False
    return inside[port.item * len(inside) // len(weights)].profile == "float"


def _with_all_codes(decision: Decision) -> Decision:
    """Without the range that only integer sums need."""
    return replace(decision, setting=decision.setting.model_copy(update={"reduced_range": None}))


def _plan_formula(draft: Draft, node: fx.Node, formula: PatternMatch) -> None:
    """Decides the parameters of a formula as for the op that it computes; the formula's numbers stay in float."""
    decisions = draft.decisions(node)
    parameters: tuple[tuple[fx.Node | None, Decision, TensorRole], ...] = (
        (formula.weight, decisions.weight, "weight"), (formula.bias, decisions.bias, "bias")
    )
    for port in ports(node):
        for parameter, decision, role in parameters:
            if parameter is not None and draft.flow.root(port.value) is draft.flow.root(parameter):
                _plan_parameter(draft, port, decision, None, role, formula.kind)


def _plan_constant(draft: Draft, port: Port, decision: Decision, kind: str) -> None:
    """Decides a constant operand like an activation; leaves it in float if these are dynamic, or in blocks."""
    node = draft.flow.root(port.value)
    if not (decision.setting.is_dynamic or decision.setting.in_blocks):
        _plan_parameter(draft, port, decision, None, None, kind)
    elif node not in draft.values:
        draft.floats.setdefault(node, "constant operand; activations are quantized dynamically, or in blocks")


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
    node, axes_at_node = _quantized_node(draft, port, axes)
    edge, keys, why = edge_site(port), (edge_site(port), node), f"{role or 'constant operand'} of {kind}"
    if decision.enabled and decision.setting.dtype == INT32.name:
        return  # rule 13
    if not decision.enabled:
        draft.floats.setdefault(node, f"float by {decision.reason}")
        if role is not None:
            draft.request(role, decision, keys, None)
        return
    is_static = draft.flow.is_static(port.value)
    kept_float = draft.excluded_reader(node) or draft.split.get(node)  # rule 14
    at_edge = kept_float is not None and is_static
    wanted = _wanted(draft, port, port.value if at_edge else node, axes if at_edge else axes_at_node, decision, why)
    if wanted is None:
        return
    row = draft.flow.row(port.user)
    if at_edge:
        draft.edges[edge] = wanted
        draft.share_edge(port, edge)
    elif kept_float is not None and role is None:  # a value of data's size, as learned queries of a batch
        draft.edges[edge] = draft.site_plan(draft.activation_spec(port.value, decision), decision, why)
        draft.share_edge(port, edge)
    elif kept_float is not None:
        draft.floats[port.value] = f"of {value_site(node)}, {kept_float}; it has no value before a batch is there"
    else:
        draft.floats.pop(node, None)
        present = draft.values.setdefault(node, wanted)
        if present.spec != wanted.spec and is_static and row is not None and port.arg in row.weights:
            first = next((reader for reader in draft.flow.readers(node) if reader.user is not port.user), port)
            draft.split[node] = (f"{_name(port)} wants it in another format than {_name(first)}; each reader rounds it "
                                 "once, on its edge")  # a constant operand or a bias takes the format that is there
    if kept_float is not None:
        draft.floats[node] = kept_float
    if role is not None:
        draft.request(role, decision, keys, wanted)


def _name(port: Port) -> str:
    """The op that reads a value."""
    return value_site(port.user).name.partition(":")[0]


def _wanted(
    draft: Draft, port: Port, node: fx.Node, axes: tuple[int, int] | None, decision: Decision, why: str
) -> SitePlan | None:
    """Returns what the decision asks for the value of ``node``, with these channel axes; ``None`` if it is unfit."""
    shape, spec = tuple(node.meta["val"].shape), None
    try:
        spec = to_spec(decision.setting, axes, len(shape), batched=len(shape) > 2 and _is_product(draft, port))
        spec.granularity.qparam_shape(shape)
    except SpecError as error:
        if spec is not None and decision.setting.remainder == "float":
            draft.floats.setdefault(node, f"float by {decision.reason}: {error}")
            return None
        draft.misfits.append(f"{value_site(node)}: {error}")
        return None
    return draft.site_plan(spec, decision, why, static=True)


def _is_product(draft: Draft, port: Port) -> bool:
    """Says whether the op is a matrix product, to which more than two axes are a stack of matrices: experts, heads."""
    row = draft.flow.row(port.user)
    return row is not None and "matmul" in row.names


def _quantized_node(
    draft: Draft, port: Port, axes: tuple[int, int] | None
) -> tuple[fx.Node, tuple[int, int] | None]:
    """The parameter read at ``port`` and its channel axes; the value at ``port`` if the axes have none in it.

    What indices select from a parameter is quantized in the parameter, which alone has a value before data is there.
    """
    root = draft.flow.root(port.value)
    if root.op != "get_attr" and draft.flow.is_static(port.value):
        return port.value, axes
    if axes is None:
        return root, None
    out, into = (draft.flow.axis_at_root(port.value, axis) for axis in axes)
    if out is not None and into is not None:
        return root, (out, into)
    return (port.value, axes) if draft.flow.is_static(port.value) else (root, None)
