"""One encoding for a state as a call takes it and as the call before returns it."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import replace

from torch import fx, nn

from qtk.calls.signature import input_nodes, output_nodes
from qtk.core.granularity import PerChannel
from qtk.core.plan import QuantPlan, SitePlan
from qtk.core.site import Site
from qtk.graph.captured_graph import CapturedGraph
from qtk.graph.flow import Flow, maker
from qtk.graph.graphs import graphs, returned_states, roots, states_of
from qtk.graph.sites import value_site
from qtk.graph.written_buffers import written_buffers
from qtk.nn.recurrent import Recurrent, RecurrentCell
from qtk.operators.targets import attribute, called_module


def pair_states(plan: QuantPlan, model: nn.Module) -> QuantPlan:
    """Lets each state share the encoding of the values that it takes, where both are quantized.

    A state is an input that is an output of the call before (``states_of``), or a buffer that forward writes. One of
    several layers shares one encoding with the states of all of them; one that several graphs write, with the values
    of all.
    """
    sites, makers, reasons = dict(plan.sites), dict[Site, list[Site]](), dict[Site, str]()
    for given, graph, returned, reason in _states(model):
        of_state = [site for site in _makers(graph, returned) if site in sites]
        if of_state and _is_moved(graph, returned, sites[of_state[0]]):
            continue  # the scales of its axis belong to another axis of the input
        makers.setdefault(given, []).extend(of_state)
        reasons[given] = reason
    for given, of_state in makers.items():
        if given in sites and of_state:
            _share(sites, of_state, given, reasons[given])
    return replace(plan, sites=sites)


def next_values(graph: fx.GraphModule) -> dict[fx.Node, fx.Node]:
    """The nodes that read states, of buffers too → the values that these have for the next call, in one graph."""
    inputs = {str(node.target): node for node in input_nodes(graph).values()}
    outputs = list(output_nodes(graph).values())
    returned = {inputs[name]: outputs[index] for name, index in returned_states(graph).items() if name in inputs}
    buffers = written_buffers(graph.graph).values()
    return returned | {buffer.read: buffer.value for buffer in buffers if buffer.read is not None}


def _states(model: nn.Module) -> Iterator[tuple[Site, CapturedGraph, fx.Node, str]]:
    """The site of each state, a graph that gives it its next value, the node of that, and the reason to share."""
    if states_of(model):
        inputs = {str(node.target): value_site(node) for node in input_nodes(roots(model)[""]).values()}
        for graph in roots(model).values():  # the model's, then its variants
            outputs = list(output_nodes(graph).items())
            for name, index in returned_states(graph).items():
                output, returned = outputs[index]
                yield inputs[name], graph, returned, f"the state that {output} is the next value of"
    yield from dict.fromkeys(_buffers(model))


def _buffers(model: nn.Module) -> Iterator[tuple[Site, CapturedGraph, fx.Node, str]]:
    """As ``_states``, of the buffers that a graph reads and one writes; graphs that only read write it back."""
    buffers = [(id(attribute(graph, str(buffer.held.target))), graph, name, buffer)
               for graph in roots(model).values() for name, buffer in written_buffers(graph.graph).items()]
    for key, _, name, taken in buffers:
        for other, graph, _, given in buffers:
            if key == other and taken.read is not None and given.value is not given.read:
                yield (value_site(taken.read), graph, given.value,
                       f"the state that forward writes into the buffer {name}")


def _is_moved(graph: CapturedGraph, returned: fx.Node, decided: SitePlan) -> bool:
    """Says whether a value has scales along an axis, and is returned with that at another place."""
    granularity = decided.spec.granularity
    return isinstance(granularity, PerChannel) and (
        Flow(graph.graph).axis_at_root(returned, granularity.axis) != granularity.axis)


def _share(sites: dict[Site, SitePlan], makers: list[Site], given: Site, reason: str) -> None:
    leader = sites[makers[0]].leader or makers[0]
    shared = replace(sites[leader], leader=leader, reason=reason)
    of_input = {given, *(site for site, decided in sites.items() if decided.leader == given)}
    of_makers = {site for site, decided in sites.items() if site in makers or decided.leader in makers}
    same_spec = {site for site in of_makers if sites[site].spec == shared.spec}
    others = {site for site in (of_input | same_spec) - {leader} if sites[site].leader != leader}
    sites |= {site: replace(shared, static=False) for site in others}


def _makers(graph: CapturedGraph, returned: fx.Node) -> list[Site]:
    """The sites of what makes a returned value: of a recurrent net the last values inside it, of each layer."""
    root = Flow(graph.graph).root(returned)
    outside, call = value_site(root), maker(root)
    module = called_module(call)
    index = root.args[1] if root.target is operator.getitem else 0
    if not isinstance(module, Recurrent | RecurrentCell) or not isinstance(index, int):
        return [outside]
    cells = [inner for path, inner in graphs(module).items() if path.endswith("cell")]
    if isinstance(module, Recurrent) and index == 0:
        cells = cells[-2 if module.bidirectional else -1:]
    part = max(index - 1, 0) if isinstance(module, Recurrent) else index
    values = [(inner, inner.graph.output_node().all_input_nodes[part]) for inner in cells]
    return [outside, *(value_site(Flow(inner.graph, is_nested=True).root(value)) for inner, value in values)]
