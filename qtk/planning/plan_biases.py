"""Rule 13 of the planner: int32 biases, in the scale of the products that they are added to."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from qtk.core.dtypes import INT32, FloatDtype
from qtk.core.granularity import PerChannel, PerTensor, Shape
from qtk.core.plan import SitePlan
from qtk.core.site import Site
from qtk.core.spec import QuantSpec
from qtk.graph.flow import maker
from qtk.graph.sites import Port, edge_site, value_site
from qtk.operators.op_row import OpRow
from qtk.operators.targets import schema_arguments
from qtk.planning.decision import Decision
from qtk.planning.draft import Draft


def plan_biases(draft: Draft) -> None:
    """Decides the int32 biases: where an op multiplies integer codes, its bias takes the scale of the products.

    Requires: all other values, parameters and edges are decided.
    Ensures: every such bias is in ``values``, in ``edges`` if several ops read it, or in ``floats`` with the reason.
    """
    for node in draft.graph.nodes:
        row = draft.flow.row(node)
        if row is None or row.bias is None or node in draft.formulas:
            continue
        decision = draft.decisions(node).bias
        if decision.enabled and decision.setting.dtype == INT32.name:
            for port in draft.flow.bias_ports(node):
                if draft.flow.is_static(port.value):
                    _plan_bias(draft, port, row, decision)


@dataclass(frozen=True, slots=True)
class _Factor:
    """The input or the weight of an op: the site that quantizes it, how, and the shape of what that quantizes."""

    site: Site
    decided: SitePlan
    shape: Shape


def _plan_bias(draft: Draft, port: Port, row: OpRow, decision: Decision) -> None:
    root = draft.flow.root(port.value)
    bias = root if root.op == "get_attr" else port.value
    factors = _factors(draft, port.user, row)
    spec = None if factors is None else _spec(tuple(port.value.meta["val"].shape), factors[1])
    if factors is None or spec is None:
        draft.floats.setdefault(bias, f"int32 by {decision.reason}, but {row.kind} adds it to no products of integers")
        return
    decided = SitePlan(
        spec, draft.scheme, static=True, factors=(factors[0].site, factors[1].site),
        reason=f"bias of {row.kind}; {decision.reason}",
    )
    draft.request("bias", decision, (edge_site(port), bias), decided)
    draft.floats.pop(bias, None)
    if bias not in draft.values and len(list(draft.flow.readers(bias))) == 1:
        draft.values[bias] = decided
    else:
        draft.edges[edge_site(port)] = decided


def _factors(draft: Draft, node: fx.Node, row: OpRow) -> tuple[_Factor, _Factor] | None:
    """The input and the weight that ``node`` multiplies; ``None`` if an integer kernel could not.

    Such a kernel multiplies codes of at most 8 bits, of the input per tensor, of the weight symmetric, and adds the
    codes of the bias as they are.
    """
    if row.product is None or row.inside is not None or row.data_arg is None:
        return None
    numbers = schema_arguments(node)
    data = {port.arg: port for port in draft.flow.data_ports(node)}.get(row.data_arg)
    weight = {port.arg: port for port in draft.flow.weight_ports(node)}.get(row.data_arg + 1)
    if data is None or weight is None or {numbers.get("alpha", 1), numbers.get("beta", 1)} != {1}:
        return None
    factors = _factor(draft, data), _factor(draft, weight)
    if factors[0] is None or factors[1] is None:
        return None
    fits = isinstance(factors[0].decided.spec.granularity, PerTensor) and factors[1].decided.spec.symmetric
    return (factors[0], factors[1]) if fits else None


def _factor(draft: Draft, port: Port) -> _Factor | None:
    """Returns what is read at ``port``; ``None`` unless it has codes of at most 8 bits and a calibrated range."""
    edge = edge_site(port)
    if edge in draft.edges:
        node, site, decided = port.value, edge, draft.edges[edge]
    else:
        producer, node = _producer(draft, port.value)
        if node not in producer.values:
            return None
        site, decided = value_site(node), producer.values[node]
    spec = decided.spec
    if spec.dynamic or isinstance(spec.dtype, FloatDtype) or spec.dtype.bits > 8:
        return None
    return _Factor(site, decided, tuple(node.meta["val"].shape))


def _producer(draft: Draft, value: fx.Node) -> tuple[Draft, fx.Node]:
    """The node that quantizes a value, and its draft: of the last graph in a composite, if this makes the value."""
    root = draft.flow.root(value)
    node = value if value in draft.values else root
    if node in draft.values:
        return draft, node
    if maker(node) in draft.nested and (maker(node) is node or node.args[1] == 0):
        last = draft.nested[maker(node)][-1]
        return last, last.flow.root(last.graph.output_node().all_input_nodes[0])
    return draft, node


def _spec(shape: Shape, weight: _Factor) -> QuantSpec | None:
    """The spec of a bias of ``shape`` with the scales of the weight; ``None`` if these do not fit its elements."""
    granularity = weight.decided.spec.granularity
    if isinstance(granularity, PerTensor):
        return QuantSpec(INT32, symmetric=True)
    if isinstance(granularity, PerChannel) and granularity.qparam_shape(weight.shape) == shape:
        return QuantSpec(INT32, PerChannel(0), symmetric=True)
    return None
