"""Rules 7, 12, 14 and 21 of the planner: quantizers on edges into ops that need another spec than the producer has."""

from __future__ import annotations

from torch import fx

from qtk.calls.inputs import is_free
from qtk.config.tensor_setting import TensorSetting
from qtk.core.block_formats import BLOCK_FORMATS
from qtk.graph.flow import maker
from qtk.graph.sites import Port, edge_site
from qtk.operators.op_row import OpRow, Product, Role
from qtk.planning.decision import Decision
from qtk.planning.draft import Draft, TensorRole, agrees


def plan_edges(draft: Draft) -> None:
    """Puts a quantizer on the edge into a compute op whose ``input`` setting differs from the value it reads.

    So also into an op with weights, or a matrix product, that reads a value which a rule with ``feeds`` set for others.

    And into a product that reads a value in blocks.

    Requires: values, parameters and merges are decided.
    Ensures: every data input whose ``input`` setting a rule enables has its spec, at the producer or in ``edges``.
    """
    for node in draft.graph.nodes:
        row = draft.flow.row(node)
        if row is None or row.role is not Role.COMPUTE or node in draft.formulas:
            continue
        decision = draft.decisions(node).input
        if decision is draft.rules.activation:
            _plan_held(draft, node)
            _plan_streams(draft, node, row)
            _plan_blocks(draft, node, row)
        else:  # a rule sets its inputs
            for port in draft.flow.data_ports(node):
                _plan_input(draft, port, decision, f"input of {row.kind}")


def _plan_input(draft: Draft, port: Port, decision: Decision, why: str, role: TensorRole = "input") -> None:
    setting = decision.setting
    if (setting.is_dynamic or setting.in_blocks) and draft.flow.is_static(port.value):
        return  # rule 4
    keys = (edge_site(port), draft.flow.root(port.value))
    if not decision.enabled:
        draft.request(role, decision, keys, None)
        return
    axis = _summed_axis(draft, port) if setting.in_blocks else None
    if setting.in_blocks and (axis is None or _has_remainder(port.value, axis, setting)):
        return
    wanted = draft.site_plan(draft.activation_spec(port.value, decision, axis), decision, why)
    present = draft.values.get(draft.flow.root(port.value))
    if present is None or not agrees(present, wanted, decision):
        draft.edges[edge_site(port)] = wanted
    draft.request(role, decision, keys, wanted)


def _plan_blocks(draft: Draft, node: fx.Node, row: OpRow) -> None:
    """Decides the inputs of a product that are rounded in blocks along the axis that it sums over."""
    for port in draft.flow.data_ports(node) if row.multiplies and draft.in_blocks else ():
        source = draft.flow.root(port.value)
        if source in draft.in_blocks:
            _plan_input(draft, port, draft.decisions(maker(source)).output, f"input of {row.kind}", "output")
            if (site := edge_site(port)) in draft.edges:
                draft.share_edge(port, site)


def _summed_axis(draft: Draft, port: Port) -> int | None:
    """The axis of the value at ``port``, counted from the end, that a product sums over; ``None`` if it has none."""
    row, rank = draft.flow.row(port.user), port.value.meta["val"].ndim
    if row is None or not row.multiplies or row.inside is not None:
        return None
    if row.product is Product.OUT_IN or rank < 2 or (row.kind == "grouped_matmul" and port.arg == 0):
        return -1
    if row.kind.startswith("conv") or row.kind == "deform_conv2d":  # channels, in front of the axes of the kernel
        weight = port.user.args[row.weights[0]]
        assert isinstance(weight, fx.Node)
        return 1 - int(weight.meta["val"].ndim)
    axes = row.weight_axes(port.user, port.value) if row.weight_axes is not None and "matmul" in row.names else None
    return None if axes is None else axes[1] - rank


def _has_remainder(value: fx.Node, axis: int, setting: TensorSetting) -> bool:
    """Says whether a value is left in float, as ``remainder`` says, for blocks do not divide its axis."""
    blocks, length = BLOCK_FORMATS.get(setting.dtype or ""), value.meta["val"].shape[axis]
    size = setting.block_size or (1 if blocks is None else blocks.length)
    return setting.remainder == "float" and not is_free(length) and length % size != 0


def _plan_held(draft: Draft, node: fx.Node) -> None:
    """Decides the inputs that stay in float at their producers, for an excluded module that reads them too."""
    for port in draft.flow.data_ports(node):
        plan = draft.held.get(draft.flow.root(port.value))
        if plan is not None:
            draft.edges[edge_site(port)] = plan
            draft.share_edge(port, edge_site(port))


def _is_quantized_inside(draft: Draft, node: fx.Node) -> bool:
    """Says whether a recurrent net computes with codes inside, so that it reads codes whatever it is fed as."""
    return any(inner.profile not in ("float", "dynamic") for inner in draft.nested.get(node, ()))


def _plan_streams(draft: Draft, node: fx.Node, row: OpRow) -> None:
    """Decides the inputs that are values of a stream, where ``node`` is not what the stream feeds."""
    for port in draft.flow.data_ports(node) if row.multiplies else ():
        source = draft.flow.root(port.value)
        stream = None if draft.flow.is_static(source) else draft.decisions(maker(source)).stream
        if stream is None or (not stream.feeds.isdisjoint(row.names) and not _is_quantized_inside(draft, node)):
            continue
        if draft.feeds is not None and draft.feeds.adds_alone(node, port.value):
            continue
        _plan_input(draft, port, stream.elsewhere, f"input of {row.kind}")
        if (site := edge_site(port)) in draft.edges:
            draft.share_edge(port, site)
