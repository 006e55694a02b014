"""Adapters (LoRA): bypasses of low rank beside a product with weights, recognized by what they do in the graph.

``W x + s · B (A x)``: two products, one after the other with no function between, of the input that a product with
more weights than both reads, added to its output. Hu et al., arXiv 2106.09685.
"""

from __future__ import annotations

import math

from torch import fx

from qtk.graph.flow import Flow
from qtk.graph.sites import ports
from qtk.operators.op_row import OpRow

SUMS, SCALINGS = frozenset({"add"}), frozenset({"mul", "div"})


def adapter_ops(graph: fx.Graph, flow: Flow) -> frozenset[fx.Node]:
    """The products of all adapters of a graph, and what scales them."""
    found: set[fx.Node] = set()
    sums: dict[fx.Node, fx.Node] = {}  # sum of a product and its adapters → the product
    for node in graph.nodes:
        row = flow.row(node)
        if row is None or row.kind not in SUMS or len(flow.data_ports(node)) != 2:
            continue
        first, second = (flow.root(port.value) for port in flow.data_ports(node))
        for base, bypass in ((first, second), (second, first)):
            product, ops = sums.get(base, base), _bypass(flow, bypass)
            if ops is not None and _is_beside(flow, ops, product):
                found |= set(ops)
                sums[node] = product
                break
    return frozenset(found)


def _bypass(flow: Flow, value: fx.Node) -> tuple[fx.Node, ...] | None:
    """The ops of ``s · B (A x)``, the product with A first; ``None`` if ``value`` is none."""
    scalings: list[fx.Node] = []
    products: list[fx.Node] = []
    while len(products) < 2:
        row = flow.row(value)
        source = _scaled(flow, value, row)
        if source is not None:
            scalings.append(value)
        elif row is not None and row.product is not None and _weights(flow, value):
            products.append(value)
            source = _data(value, row)
        if source is None:
            return None
        value = flow.root(source)
    return (*reversed(products), *scalings)


def _is_beside(flow: Flow, ops: tuple[fx.Node, ...], product: fx.Node) -> bool:
    """Says whether a bypass has the input of ``product``, and fewer weights."""
    row = flow.row(product)
    weights = _weights(flow, product)
    if row is None or row.product is None or not weights or product in ops:
        return False
    sources = []
    for op in (ops[0], product):
        own = flow.row(op)
        data = None if own is None else _data(op, own)
        sources.append(None if data is None else flow.root(data))
    return sources[0] is not None and sources[0] is sources[1] and sum(
        _weights(flow, op) for op in ops[:2]) < weights


def _scaled(flow: Flow, value: fx.Node, row: OpRow | None) -> fx.Node | None:
    """Returns what a product or quotient with a number scales."""
    if row is None or row.kind not in SCALINGS:
        return None
    moving = [port.value for port in ports(value) if not flow.is_static(port.value)]
    numbers = [port.value for port in ports(value) if flow.is_static(port.value)]
    return moving[0] if len(moving) == 1 and all(each.meta["val"].numel() == 1 for each in numbers) else None


def _weights(flow: Flow, op: fx.Node) -> int:
    """The number of weights that an op multiplies with."""
    return sum(math.prod(int(length) for length in port.value.meta["val"].shape) for port in flow.weight_ports(op))


def _data(op: fx.Node, row: OpRow) -> fx.Node | None:
    found = None if row.data_arg is None or row.data_arg >= len(op.args) else op.args[row.data_arg]
    return found if isinstance(found, fx.Node) else None
