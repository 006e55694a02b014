"""Where the attention of a graph reads keys and values: a fused op, or two products around a softmax."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import fx

from qtk.graph.flow import Flow, maker
from qtk.graph.insert import quantizer_called
from qtk.graph.sites import Port, ports
from qtk.operators.op_row import OpRow, Role
from qtk.operators.targets import aten_name, schema_arguments
from qtk.quantizers.quantizer import Quantizer

FUSED, SOFTMAX, EINSUM = "attention", "softmax", "einsum"
"""Kinds of the op table."""


@dataclass(frozen=True, slots=True)
class Operand:
    """Keys or values, as attention reads them.

    Args:
        port: where.
        tokens: their axis that counts tokens, from the end.
        width: their axis that counts the entries of one head, from the end.
    """

    port: Port
    tokens: int
    width: int


@dataclass(frozen=True, slots=True)
class AttentionReads:
    """The keys and the values of one attention."""

    keys: Operand
    values: Operand


def attentions(graph: fx.Graph, flow: Flow) -> Iterator[AttentionReads]:
    """The attentions of a graph, quantized or not, in order.

    An attention in small ops is a product of a softmax with values, where the softmax reads the product of queries and
    keys, whatever is between (scales, masks, soft caps, sinks, dropout). A factor that is a parameter is none.

    >>> import qtk, torch
    >>> class Head(torch.nn.Module):
    ...     def forward(self, q, k, v):
    ...         return (q @ k.mT / 4).softmax(-1) @ v
    >>> graph = qtk.prepare_model(Head(), (torch.randn(2, 3, 8),) * 3).graph
    >>> [(each.keys.port.value.name, each.values.port.value.name) for each in attentions(graph, Flow(graph))]
    [('m_t', 'v')]
    """
    for node in graph.nodes:
        row = flow.row(node)
        if row is not None and row.kind == FUSED:
            _, keys, values, *_ = ports(node)
            yield AttentionReads(Operand(keys, -2, -1), Operand(values, -2, -1))
        else:
            yield from _spelled_out(flow, node)


def cache_quantizers(flow: Flow, operand: Operand) -> list[Quantizer]:
    """The quantizers that round keys or values: of attention's keys and values, and of what is merged to them."""
    found: dict[Quantizer, None] = {}
    for node in _behind(flow, operand.port.value, lambda row: row is None or not row.keeps_elements):
        quantizer = quantizer_called(node)
        found |= {} if quantizer is None else {quantizer: None}
    return list(found)


def is_assembled(flow: Flow, operand: Operand) -> bool:
    """Says whether the entries of one head come from several layers, side by side, as for keys computed from a latent.

    A cache holds what these are made from, as in DeepSeek's attention.
    """
    def layers(value: fx.Node) -> set[fx.Node]:
        return {node for node in _behind(flow, value, _multiplies) if _multiplies(flow.row(node))}

    for node in _behind(flow, operand.port.value, lambda row: row is None or not row.keeps_elements):
        row = flow.row(node)
        dim = schema_arguments(node).get("dim") if row is not None and row.kind == "concat" else None
        if isinstance(dim, int) and dim in (-1, node.meta["val"].ndim - 1):
            parts = [own for port in flow.data_ports(node) if (own := layers(port.value))]
            if any(a.isdisjoint(b) for a, b in itertools.combinations(parts, 2)):
                return True
    return False


def _spelled_out(flow: Flow, node: fx.Node) -> Iterator[AttentionReads]:
    """The attention whose last product is ``node``, if there is one."""
    factors = _factors(flow, node)
    for weights, values in itertools.permutations(factors, 2):
        softmax = next(_ends(flow, weights.value, SOFTMAX), None)
        axes = None if softmax is None else _axes(values, factors)
        if softmax is None or axes is None:
            continue
        dim = schema_arguments(softmax)["dim"]
        over = dim - softmax.meta["val"].ndim if isinstance(dim, int) and dim >= 0 else dim
        keys = [Operand(key, found.alone, found.summed) for product in _products(flow, softmax)
                for own in [_factors(flow, product)] for key in own
                if (found := _axes(key, own)) is not None and found.place == over]
        if keys:
            yield AttentionReads(_of_tokens(flow, keys, values), Operand(values, axes.summed, axes.alone))
            return


def _of_tokens(flow: Flow, keys: list[Operand], values: Port) -> Operand:
    """The keys among the factors of several scores that are added up: positions are no data of the values."""
    if len(keys) == 1:
        return keys[0]
    read, of_values = [_inputs(flow, key.port.value) for key in keys], _inputs(flow, values.value)
    return max(zip(keys, read, strict=True), key=lambda each: (not of_values.isdisjoint(each[1]), bool(each[1])))[0]


def _inputs(flow: Flow, value: fx.Node) -> set[fx.Node]:
    return {node for node in _behind(flow, value, lambda row: False) if node.op == "placeholder"}


def _factors(flow: Flow, node: fx.Node) -> list[Port]:
    """The two values, no parameters, whose product an op computes; empty of other ops."""
    row = flow.row(node)
    if row is None or row.weight_axes is None or row.inside is not None:
        return []
    read = flow.data_ports(node)
    return read if len(read) == 2 and all(port.value.meta["val"].ndim > 1 for port in read) else []


@dataclass(frozen=True, slots=True)
class _Axes:
    """Axes of a factor, from the end: its own, the summed one, and where its own is in the product."""

    alone: int
    summed: int
    place: int


def _axes(factor: Port, factors: list[Port]) -> _Axes | None:
    """``None`` if several axes are of its own or summed."""
    node, left = factor.user, factors[0]
    if not isinstance(node.args[0], str):  # of an einsum the equation
        if factor is left:
            return _Axes(-2, -1, -2)
        return _Axes(-2, -1, -1) if aten_name(node.target) == "linear" else _Axes(-1, -2, -1)
    terms, arrow, output = node.args[0].replace(" ", "").partition("->")
    letters = terms.replace(",", "").replace(".", "")
    output = output if arrow else "..." + "".join(sorted(each for each in letters if letters.count(each) == 1))
    own, *others = (terms.split(",")[each.item or 0] for each in sorted(factors, key=lambda each: each is not factor))
    other = "".join(others)
    alone = [each for each in own if each in output and each not in other]
    summed = [each for each in own if each in other and each not in output]
    if len(alone) != 1 or len(summed) != 1:
        return None
    return _Axes(own.index(alone[0]) - len(own), own.index(summed[0]) - len(own),
                 output.index(alone[0]) - len(output))


def _products(flow: Flow, softmax: fx.Node) -> Iterator[fx.Node]:
    """The products of two values that a softmax reads, directly or behind other ops."""
    for node in _behind(flow, softmax.all_input_nodes[0], _multiplies):
        if _factors(flow, node):
            yield node


def _ends(flow: Flow, value: fx.Node, kind: str) -> Iterator[fx.Node]:
    """The ops of a kind behind a value, with no product between."""
    for node in _behind(flow, value, lambda row: row is not None and (row.kind == kind or row.multiplies)):
        row = flow.row(node)
        if row is not None and row.kind == kind:
            yield node


def _multiplies(row: OpRow | None) -> bool:
    return row is not None and row.multiplies


def _behind(flow: Flow, value: fx.Node, is_end: Callable[[OpRow | None], bool]) -> Iterator[fx.Node]:
    """The ops that a value is computed by, backwards through data, and through quantizers, to the ops that end it."""
    pending, seen = [value], set[fx.Node]()
    while pending:
        node = maker(pending.pop())
        if node in seen or flow.is_static(node):
            continue
        seen.add(node)
        yield node
        row = flow.row(node)
        if quantizer_called(node) is not None:
            pending += node.all_input_nodes
        elif row is not None and row.role is not Role.CREATE and not is_end(row):
            pending += [port.value for port in reversed(flow.data_ports(node))]
