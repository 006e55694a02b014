"""Rule 5 of the planner: one encoding for the inputs and the output of a merge (concat, stack, where, scatter)."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from qtk.core.plan import SitePlan
from qtk.graph.op_row import Role
from qtk.graph.sites import Port, edge_site, value_site
from qtk.planning.draft import Draft, is_empty


def share_merges(draft: Draft) -> None:
    """Lets the values that a quantized merge reads share the encoding of its output.

    Requires: values and parameters are decided.
    Ensures: every quantized input of a merge has the encoding of its output, at its producer if nothing else reads it,
    else on its edge; chains of merges have one leader, the last. Dynamically quantized values share nothing.
    """
    for node in reversed(draft.graph.nodes):
        row = draft.flow.row(node)
        if row is not None and row.role is Role.MERGE and draft.flow.carried(node) is None and node in draft.values:
            _share(draft, node, draft.values[node])


def _share(draft: Draft, merge: fx.Node, merged: SitePlan) -> None:
    if merged.spec.dynamic:
        return  # each tensor has a range of its own
    follower = replace(merged, leader=merged.leader or value_site(merge), reason=f"merged by {value_site(merge)}")
    for port in draft.flow.data_ports(merge):
        if not is_empty(port.value):
            _share_one(draft, port, follower)


def _share_one(draft: Draft, port: Port, follower: SitePlan) -> None:
    source = draft.flow.root(port.value)
    present = draft.values.get(source)
    if present is None and source not in draft.held and not draft.flow.is_static(source):
        return  # float by a rule or inside an unquantized region: nothing to share
    if present is not None and present.leader == follower.leader:
        return  # Concat(x, x): shared already
    is_read_here_alone = all(reader.user is port.user for reader in draft.flow.readers(source))
    is_free = source not in draft.held and (present is None or (present.leader is None and present.range is None))
    if is_read_here_alone and is_free:
        draft.values[source] = replace(follower, static=False)
    else:
        draft.edges[edge_site(port)] = follower
