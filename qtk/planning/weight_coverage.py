"""Warns where a large share of the weights that a configuration asks for stays in float."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import fx

from qtk.graph.sites import edge_site, value_site
from qtk.planning.draft import Draft

SHARE = 0.1
"""Of the parameters, from which a warning is due."""

SHOWN = 3


def warn_of_weights_in_float(drafts: Sequence[Draft]) -> None:
    """Warns if more than ``SHARE`` of the parameters, counted one by one, stays in float though no rule says so."""
    asked: dict[fx.Node, int] = {}
    left: dict[fx.Node, str] = {}
    for draft in drafts:
        for node in draft.graph.nodes:
            for port in draft.flow.weight_ports(node):
                if not draft.of_parameter(port).weight.enabled:
                    continue
                root = draft.flow.root(port.value)
                asked[root] = root.meta["val"].numel()
                if draft.planned((root, port.value, edge_site(port))) is None:
                    left[root] = draft.floats.get(root, "it is read in a way that has no format")
    elements, total = sum(asked[node] for node in left), sum(asked.values())
    if elements > SHARE * total:
        listed = "; ".join(f"{value_site(node)}: {reason}" for node, reason in list(left.items())[:SHOWN])
        more = f"; and {len(left) - SHOWN} more" if len(left) > SHOWN else ""
        warnings.warn(
            f"{elements / total:.0%} of the weights that the config asks for stay in float ({len(left)} of "
            f"{len(asked)} tensors): {listed}{more}", stacklevel=5,
        )
