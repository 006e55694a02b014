"""Which values of a model may carry an attention mask: −inf, or a number like it, at masked positions."""

from __future__ import annotations

from torch import fx, nn

from qtk.core.site import Site
from qtk.graph.flow import Flow
from qtk.graph.graphs import graphs, nested_graphs
from qtk.graph.sites import is_float, value_site
from qtk.operators.op_row import Mask, OpRow

ADDING = frozenset({"add", "sub", "rsub"})
"""Kinds of ops that put a mask into scores."""


def maskable_sites(model: nn.Module) -> set[Site]:
    """The sites of values that a softmax or the like reads, or that a masked fill, or adding a mask, makes.

    Sums, scalings and data movement between them do not matter.

    >>> import qtk, torch
    >>> class Scores(nn.Module):
    ...     def forward(self, q, k, mask):
    ...         return (q @ k.mT + mask).softmax(-1) @ k
    >>> q, mask = torch.randn(1, 4, 8), torch.zeros(4, 4)
    >>> sorted(site.name for site in maskable_sites(qtk.prepare_model(Scores(), (q, q, mask))) if site.port)
    ['add:out', 'mask:input', 'matmul:out']
    """
    sites: set[Site] = set()
    for graph in graphs(model).values():
        flow = Flow(graph.graph)
        nodes = list(graph.graph.nodes)
        sites |= {value_site(node) for node in _before_readers(nodes, flow) | _behind_makers(nodes, flow)}
    return sites


def _before_readers(nodes: list[fx.Node], flow: Flow) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for node in reversed(nodes):
        row = flow.row(node)
        is_reader = bool(nested_graphs(node)) or (row is not None and Mask.READS in row.mask)
        if is_reader or (node in found and _passes(row)):
            is_composite = bool(nested_graphs(node))
            found.update(read for read in node.all_input_nodes if not (is_composite and _is_product(flow, read)))
    return found


def _behind_makers(nodes: list[fx.Node], flow: Flow) -> set[fx.Node]:
    found: set[fx.Node] = set()
    masks = _masks(nodes, flow)
    for node in nodes:
        row = flow.row(node)
        makes = row is not None and (Mask.MAKES in row.mask or (_adds(row) and _reads_both(node, masks, flow)))
        if makes or (row is not None and _passes(row) and not found.isdisjoint(node.all_input_nodes)):
            found.add(node)
    return found


def _masks(nodes: list[fx.Node], flow: Flow) -> set[fx.Node]:
    """The values that may be masks to add: computed from integers alone, or from inputs that are only added."""
    added: set[fx.Node] = set()
    for node in reversed(nodes):
        rows = [(user, flow.row(user)) for user in node.users]
        if rows and all(_adds(row) or (_passes(row) and user in added) for user, row in rows):
            added.add(node)
    found: set[fx.Node] = set()
    for node in nodes:
        read = [value for value in node.all_input_nodes if not flow.is_static(value)]
        if not is_float(node) or (node.op == "placeholder" and node in added) or (
            read and found.issuperset(read) and _passes(flow.row(node))
        ):
            found.add(node)
    return found


def _reads_both(node: fx.Node, masks: set[fx.Node], flow: Flow) -> bool:
    """Says whether an op reads data of which some may be a mask and some are none."""
    read = {value for value in node.all_input_nodes if is_float(value) and not flow.is_static(value)}
    return not read.isdisjoint(masks) and not read <= masks


def _adds(row: OpRow | None) -> bool:
    return row is not None and row.kind in ADDING


def _passes(row: OpRow | None) -> bool:
    return row is None or row.keeps_elements or Mask.KEEPS in row.mask


def _is_product(flow: Flow, node: fx.Node) -> bool:
    row = flow.row(flow.root(node))
    return row is not None and row.product is not None
