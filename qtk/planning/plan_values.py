"""Rules 1, 2, 3, 6, 9, 11, 14, 15, 17 and 19 of the planner: quantizes values at their producers."""

from __future__ import annotations

from torch import Tensor, fx

from qtk.graph.flow import is_result, maker
from qtk.graph.sites import exclusion, is_float
from qtk.graph.written_buffers import is_input
from qtk.operators.lookup import op_name
from qtk.operators.op_row import Role
from qtk.operators.op_table import CHANNEL_SCALE, SCAN
from qtk.planning.decision import Decision
from qtk.planning.draft import Draft, is_empty


def plan_values(draft: Draft) -> None:
    """Decides every float value that an op computes, and every float input and state of the model.

    What ops compute of complex numbers stays in float, and is listed.

    Requires: graphs inside composites are planned.
    Ensures: every such value is in ``values``, or in ``floats`` with the reason, unless a composite quantizes it
    inside, it is an input of a nested graph, or a constant that no op computes with.
    """
    inner = _inner_values(draft)
    for node in draft.graph.nodes:
        if is_float(node) and node.op != "get_attr" and draft.flow.carried(node) is None:
            _plan_value(draft, node, inner.get(node))
        elif _is_complex(draft, node):
            draft.floats[node] = "complex numbers, which have no quantized form"


def _is_complex(draft: Draft, node: fx.Node) -> bool:
    """Says whether a parameter holds, or a compute op makes, complex numbers."""
    value, row = node.meta.get("val"), draft.flow.row(node)
    is_made = node.op == "get_attr" or (row is not None and row.role is Role.COMPUTE)
    return is_made and isinstance(value, Tensor) and value.is_complex()


def _inner_values(draft: Draft) -> dict[fx.Node, str]:
    """The values inside supergroups and formulas, each with the reason to leave it in float (rule 3)."""
    inner = {node: f"inside supergroup {group}" for node, group in draft.groups.items() if node is not group.nodes[-1]}
    inner |= {
        node: f"inside {formula.kind}, spelled out"
        for node, formula in draft.formulas.items() if node != formula.nodes[-1]
    }
    return inner


def _plan_value(draft: Draft, node: fx.Node, inner: str | None) -> None:
    op, formula = maker(node), draft.formulas.get(node)
    decision = draft.decisions(op).output
    row, reason = draft.flow.row(node), _stays_float(draft, node) or inner
    if inner is None and not decision.enabled:
        draft.request("output", decision, (node,), None)
    if reason is not None:
        draft.floats[node] = reason
    elif _is_quantized_inside(draft, op):
        pass  # the last value inside the composite has the quantizer
    elif is_input(node):
        _plan_input(draft, node, decision)
    elif row is None or row is SCAN:
        _plan_unknown(draft, node, decision, "a scan" if row is SCAN else f"op {op_name(op)} is not in the op table")
    elif draft.flow.is_constant(node):
        _plan_if_read(draft, node, decision, "constant")
    else:
        _plan_computed(draft, node, decision, formula.kind if formula else row.kind)


def _stays_float(draft: Draft, node: fx.Node) -> str | None:
    """Says why no configuration can quantize the value, ``None`` if one can."""
    if reason := exclusion(node):
        return reason
    if is_empty(node):
        return "has no elements"
    if draft.flow.is_static(node):
        return "computed from parameters"  # rule 4 decides where it is read
    if draft.counts(node):
        return "counts, indices, offsets or a mask"  # rule 15
    if node in draft.flow.losses:
        return "of a loss"  # rule 17
    if node in draft.absolute:
        return "an angle, or rounded next: a step of its range would be more than that tells apart"  # rule 19
    readers = list(draft.flow.readers(node))
    if readers and all(draft.flow.row(port.user) is CHANNEL_SCALE for port in readers):
        return "scaled per channel first"  # rule 11
    return None


def _is_quantized_inside(draft: Draft, op: fx.Node) -> bool:
    """Says whether a composite returns values that the last graph inside it has quantized (rule 10)."""
    if op not in draft.nested:
        return False
    last = draft.nested[op][-1]
    return all(last.flow.root(value) in last.values for value in last.graph.output_node().all_input_nodes)


def _plan_input(draft: Draft, node: fx.Node, decision: Decision) -> None:
    """Decides a model input or a state (rule 2); inputs of nested graphs are quantized outside."""
    if draft.io is None:
        if decision.enabled and decision.setting.in_blocks:
            draft.in_blocks.add(node)
        return
    readers = list(draft.flow.readers(node))
    if draft.io.inputs == "float":
        draft.floats[node] = "io.inputs is float"
    elif (reason := next(filter(None, map(draft.why_float, readers)), None)) is not None:
        draft.floats[node] = reason
    elif any(draft.takes_data(port) for port in readers):
        draft.decide(node, decision, "model input" if node.op == "placeholder" else "buffer that forward writes")
    else:
        rows = [row for port in readers if (row := draft.flow.row(port.user)) is not None and port.arg != 0]
        added_by = sorted({row.kind for row in rows if row.role is Role.COMPUTE})
        reason = f"read as bias, scale or shift by {', '.join(added_by)}" if added_by else "no op computes with it"
        draft.floats[node] = draft.unknown_readers(readers) or reason


def _plan_unknown(draft: Draft, node: fx.Node, decision: Decision, reason: str) -> None:
    """Decides the value of a scan, or an op without a row (rule 6)."""
    if not _plan_if_read(draft, node, decision, reason):
        draft.floats[node] = reason


def _plan_if_read(draft: Draft, node: fx.Node, decision: Decision, source: str) -> bool:
    """Decides the value if a known op computes with it. Returns: whether one does."""
    reader = next((port.user for port in draft.flow.readers(node) if draft.takes_data(port)), None)
    if reader is not None:
        draft.decide(node, decision, f"{source}; read by {reader.name}")
    return reader is not None


def _plan_computed(draft: Draft, node: fx.Node, decision: Decision, kind: str) -> None:
    """Decides the value of a compute op (rules 1 and 9), observing ``io.outputs``."""
    readers = list(draft.flow.readers(node))
    is_output = all(map(is_result, readers))
    if (reason := next(filter(None, map(draft.why_float, readers)), None)) is not None:
        draft.floats[node] = reason
    elif is_output and draft.io is not None and draft.io.outputs == "float":
        draft.floats[node] = "io.outputs is float"
    else:
        draft.decide(node, decision, kind)
