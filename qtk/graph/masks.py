"""Which values of a model may carry an attention mask: −inf, or a number like it, at masked positions."""

from __future__ import annotations

from torch import fx, nn

from qtk.core.site import Site
from qtk.graph.float_root import float_root
from qtk.graph.flow import Flow
from qtk.graph.graphs import graphs, nested_graphs
from qtk.graph.insert import quantizer_called
from qtk.graph.sites import is_float, value_site
from qtk.operators.op_row import Mask
from qtk.operators.targets import attribute

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
        if is_reader or (node in found and (row is None or _passes(node, flow))):
            is_composite = bool(nested_graphs(node))
            found.update(read for read in node.all_input_nodes if not (is_composite and _is_product(flow, read)))
    return found


def _behind_makers(nodes: list[fx.Node], flow: Flow) -> set[fx.Node]:
    found: set[fx.Node] = set()
    masks = _masks(nodes, flow)
    for node in nodes:
        row = flow.row(node)
        makes = row is not None and (Mask.MAKES in row.mask or (_adds(node, flow) and _reads_both(node, masks, flow)))
        if makes or (_passes(node, flow) and not found.isdisjoint(node.all_input_nodes)):
            found.add(node)
    return found


def _masks(nodes: list[fx.Node], flow: Flow) -> set[fx.Node]:
    """The values that may be masks to add: of integers and constants alone, or of inputs that are only added."""
    added: set[fx.Node] = set()
    for node in reversed(nodes):
        if node.users and all(_adds(user, flow) or (_passes(user, flow) and user in added) for user in node.users):
            added.add(node)
    found: set[fx.Node] = set()
    for node in nodes:
        read = [value for value in node.all_input_nodes if not _is_learned(value, flow)]
        is_of_masks = bool(read) and found.issuperset(read) and _passes(node, flow)
        is_constant = flow.is_static(node) and not _is_learned(node, flow)
        if not is_float(node) or is_constant or is_of_masks or (node.op == "placeholder" and node in added):
            found.add(node)
    return found


def _reads_both(node: fx.Node, masks: set[fx.Node], flow: Flow) -> bool:
    """Says whether an op reads data of which some may be a mask and some are none."""
    read = {value for value in node.all_input_nodes if is_float(value) and not _is_learned(value, flow)}
    return not read.isdisjoint(masks) and not read <= masks


def _is_learned(node: fx.Node, flow: Flow) -> bool:
    """Says whether a value is a parameter, moved or not."""
    root, owner = float_root(flow, node), node.graph.owning_module
    return root.op == "get_attr" and owner is not None and isinstance(attribute(owner, str(root.target)), nn.Parameter)


def _adds(node: fx.Node, flow: Flow) -> bool:
    row = flow.row(node)
    return row is not None and row.kind in ADDING


def _passes(node: fx.Node, flow: Flow) -> bool:
    """Says whether the result of an op, or quantizer, has the mask of an operand."""
    row = flow.row(node)
    if row is None:
        return quantizer_called(node) is not None
    return row.keeps_elements or Mask.KEEPS in row.mask


def _is_product(flow: Flow, node: fx.Node) -> bool:
    row = flow.row(flow.root(node))
    return row is not None and row.product is not None
