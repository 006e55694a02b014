"""Rule 5 of the planner: one encoding for the inputs and the output of a merge (concat, stack, where, scatter)."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from qtk.core.granularity import PerChannel
from qtk.core.plan import SitePlan
from qtk.graph.flow import is_result, maker, reads_shape_only
from qtk.graph.sites import Port, edge_site, value_site
from qtk.operators.lookup import PAD_WITH_VALUE
from qtk.operators.op_row import OpRow, Role
from qtk.planning.draft import Draft, is_empty

WITH_KERNELS = ("concat", "stack")
"""The merges that runtimes compute on codes."""


def share_merges(draft: Draft) -> None:
    """Lets the values that a quantized merge reads share the encoding of its output.

    Requires: values and parameters are decided, and caches, whose merges stay as they are.
    Ensures: a merge that is better left in float is in ``floats``; every quantized input of another has the encoding of
    its output, at its producer if nothing else reads it, else on its edge; chains of merges have one leader, the last.
    Dynamically quantized values share nothing.
    """
    for node in reversed(draft.graph.nodes):
        row = draft.flow.row(node)
        is_open = node in draft.values and node not in draft.cached
        if row is not None and _merges(row) and draft.flow.carried(node) is None and is_open:
            reason = None if draft.values[node].spec.dynamic else _stays_float(draft, node, row)
            if reason is not None:
                del draft.values[node]
                draft.floats[node] = reason
            elif row.role is Role.MERGE:
                _share(draft, node, draft.values[node])


def _merges(row: OpRow) -> bool:
    """Says whether an op puts values beside others: a merge, or padding with a number other than 0."""
    return row.role is Role.MERGE or row is PAD_WITH_VALUE


def _stays_float(draft: Draft, merge: fx.Node, row: OpRow) -> str | None:
    """Says why a merge that no rule speaks of is better left in float, ``None`` if it is not."""
    readers = list(draft.flow.readers(merge))
    is_asked_for = bool(draft.decisions(maker(merge)).output.rules)
    if draft.io is None or is_asked_for or any(_needs_codes(draft, port) for port in readers):
        return None
    if row.kind not in WITH_KERNELS:
        return f"no integer kernel for {row.kind}: what it merges keeps its own ranges"
    if all(is_result(port) or draft.last_of(port.user) not in draft.values for port in readers):
        return "only outputs and float ops read it: what it merges keeps its own ranges"
    return None


def _needs_codes(draft: Draft, port: Port) -> bool:
    row = draft.flow.row(port.user) if port.user.op != "output" else None
    return port.user in draft.nested or (row is not None and (row.multiplies or bool(row.weights)))


def _share(draft: Draft, merge: fx.Node, merged: SitePlan) -> None:
    if merged.spec.dynamic:
        return  # each tensor has a range of its own
    follower = replace(merged, leader=merged.leader or value_site(merge), reason=f"merged by {value_site(merge)}")
    shape, granularity = merge.meta["val"].shape, merged.spec.granularity
    for port in draft.flow.data_ports(merge):
        along = granularity.axis if isinstance(granularity, PerChannel) else None
        if not is_empty(port.value) and (along is None or port.value.meta["val"].shape[along] == shape[along]):
            _share_one(draft, port, follower)


def _share_one(draft: Draft, port: Port, follower: SitePlan) -> None:
    source = draft.flow.root(port.value)
    present = draft.values.get(source)
    if present is None and source not in draft.held and not draft.flow.is_static(source):
        return  # float by a rule or inside an unquantized region: nothing to share
    if present is not None and present.leader == follower.leader:
        return  # Concat(x, x): shared already
    is_read_here_alone = all(
        reader.user is port.user or reads_shape_only(reader.user) for reader in draft.flow.readers(source)
    )
    is_free = source not in draft.held and (present is None or (present.leader is None and present.range is None))
    if isinstance(follower.spec.granularity, PerChannel) and source is not port.value:  # the axis is another there
        draft.edges[edge_site(port)] = follower
        if is_read_here_alone and is_free and draft.values.pop(source, None) is not None:
            draft.floats[source] = f"rounded where {value_site(port.user)} merges it, with scales of an axis"
    elif is_read_here_alone and is_free:
        draft.values[source] = replace(follower, static=False)
    else:
        draft.edges[edge_site(port)] = follower
