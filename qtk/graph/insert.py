"""Inserts quantizers at the sites of a plan, and removes them: ``remove(insert(g)) == g``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from torch import fx, nn

from qtk.core.plan import QuantPlan
from qtk.core.site import Site
from qtk.errors import EncodingError
from qtk.graph.graphs import graphs
from qtk.graph.simulation import Simulation
from qtk.graph.sites import SITE, Port, add_labels, edge_site, ports, value_site
from qtk.graph.unrounded import read_unrounded, remove_copies
from qtk.operators.lookup import row_of
from qtk.operators.op_table import CHANNEL_SCALE
from qtk.operators.targets import MODULE_STACK, called_module
from qtk.quantizers.bias_quantizer import BiasQuantizer
from qtk.quantizers.quantizer import Quantizer

QUANTIZERS = "qtk_quantizers"
"""The submodule of a graph that holds its quantizers, each under its site's name."""


def quantizer_target(site: Site) -> str:
    """The module path of the quantizer of ``site`` in its graph."""
    return f"{QUANTIZERS}.{site.name}"


def insert(
    model: nn.Module, plan: QuantPlan, *, known: Mapping[Site, Quantizer] = MappingProxyType({})
) -> dict[Site, Quantizer]:
    """Adds one quantizer for every leader of ``plan``, called at the leader and at every follower.

    A channel scale keeps reading the value in front of its quantizer: it is rounded once, after the multiplication. Of
    model inputs so do comparisons and the like (``qtk.graph.unrounded``).

    Args:
        model: a prepared model; changed.
        plan: what is quantized, and how.
        known: quantizers to use instead of new ones.

    Returns: site → quantizer, in plan order; followers map to their leader's.

    Raises: EncodingError if the plan names a site the model does not have.
    """
    located = [(module, *_locations(module.graph)) for module in graphs(model).values()]
    _check_sites(plan, [{*values, *edges} for _, values, edges in located])
    quantizers = _quantizers(plan, {site for _, values, _ in located for site in values}, known)
    for module, values, edges in located:
        for site in [site for site in plan if site in values or site in edges]:
            leader = _leader(plan, site)
            target = quantizer_target(leader)
            if leader == site or not _has(module, target):
                module.add_submodule(target, quantizers[leader])
            if site in values:
                _after(values[site], target, site)
            else:
                _on_edge(edges[site], target, site)
        read_unrounded(node for node in quantizer_nodes(module) if node.all_input_nodes[0].op == "placeholder")
        module.recompile()
    return {site: quantizers[_leader(plan, site)] for site in plan}


def _quantizers(plan: QuantPlan, values: Collection[Site], known: Mapping[Site, Quantizer]) -> dict[Site, Quantizer]:
    """Leader → its quantizer, known or new; a quantizer of an int32 bias is always new: it follows two others."""
    quantizers = {
        site: known.get(site) or Quantizer(decided.spec, site=site.name, cache=decided.static and site in values,
                                           static=decided.static)
        for site, decided in plan.items() if decided.leader is None and decided.factors is None
    }
    for site, decided in plan.items():
        if decided.factors is not None:
            of_input, of_weight = (quantizers[_leader(plan, factor)] for factor in decided.factors)
            quantizers[site] = BiasQuantizer(decided.spec, of_input, of_weight, site=site.name)
            quantizers[site].mode = known[site].mode if site in known else quantizers[site].mode
    return quantizers


def _check_sites(plan: QuantPlan, located: Sequence[set[Site]]) -> None:
    missing = [site.name for site in plan if not any(site in sites for sites in located)]
    if missing:
        raise EncodingError(f"the plan belongs to another model: no such sites: {', '.join(missing[:5])}")


def _leader(plan: QuantPlan, site: Site) -> Site:
    """The site whose quantizer ``site`` shares; itself if it has its own."""
    return plan[site].leader or site


def remove(model: nn.Module) -> None:
    """Removes every quantizer. Changes ``model`` back to its state before ``insert``."""
    for module in graphs(model).values():
        for node in quantizer_nodes(module):
            (value,) = node.args
            assert isinstance(value, fx.Node)
            node.replace_all_uses_with(value)
            module.graph.erase_node(node)
        remove_copies(module.graph)
        module.recompile()
    for module in graphs(model).values():  # after all: graphs of one module have one set of quantizers
        if hasattr(module, QUANTIZERS):
            module.delete_submodule(QUANTIZERS)


def quantizer_called(node: fx.Node) -> Quantizer | None:
    """The quantizer that ``node`` calls, ``None`` if it calls none."""
    module = called_module(node)
    return module if isinstance(module, Quantizer) else None


def quantizer_nodes(model: fx.GraphModule) -> dict[fx.Node, Quantizer]:
    """Node → quantizer for every call of a quantizer in one graph, in order."""
    return {node: called for node in model.graph.nodes if (called := quantizer_called(node)) is not None}


def _locations(graph: fx.Graph) -> tuple[Mapping[Site, fx.Node], Mapping[Site, Port]]:
    values: dict[Site, fx.Node] = {}
    edges: dict[Site, Port] = {}
    for node in graph.nodes:
        if node.op != "output":
            values.setdefault(value_site(node), node)
            edges.update((edge_site(port), port) for port in ports(node))
    return values, edges


def _call(target: str, value: fx.Node, site: Site) -> fx.Node:
    node = value.graph.call_module(target, (value,))
    add_labels(node, **{SITE: site.name})
    node.meta["val"] = value.meta["val"]
    if MODULE_STACK in value.meta:
        node.meta[MODULE_STACK] = value.meta[MODULE_STACK]
    return node


def _after(value: fx.Node, target: str, site: Site) -> None:
    with value.graph.inserting_after(value):
        call = _call(target, value, site)
    value.replace_all_uses_with(
        call, delete_user_cb=lambda user: user is not call and row_of(user) is not CHANNEL_SCALE
    )


def _on_edge(port: Port, target: str, site: Site) -> None:
    current = port.user.args[port.arg]
    if port.item is not None:
        assert isinstance(current, (list, tuple))
        current = current[port.item]
    assert isinstance(current, fx.Node)
    with port.user.graph.inserting_before(port.user):
        call = _call(target, current, site)
    if port.item is None:
        port.user.update_arg(port.arg, call)
    else:
        listed = list(port.user.args[port.arg])  # type: ignore[arg-type]
        listed[port.item] = call
        port.user.update_arg(port.arg, listed)


def drop_sites(simulation: Simulation, reasons: Mapping[Site, str]) -> Simulation:
    """Removes the quantizers of some sites, and of all sites whose encoding is or follows from theirs.

    Changes the model. Returns: the simulation without them, each listed in its plan as unquantized with its reason.
    """
    model, plan = simulation.model, simulation.plan
    leaders = {_leader(plan, site): reason for site, reason in reasons.items()}
    for site, decided in plan.items():
        for factor in decided.factors or ():
            if _leader(plan, factor) in leaders:
                leaders.setdefault(site, f"{factor} is not quantized: {leaders[_leader(plan, factor)]}")
    dropped = {site: leaders[leader] for site in plan if (leader := _leader(plan, site)) in leaders}
    targets = {quantizer_target(leader) for leader in leaders}
    for module in graphs(model).values():
        for node in quantizer_nodes(module):
            if node.target in targets:
                node.replace_all_uses_with(node.all_input_nodes[0])
                module.graph.erase_node(node)
        module.recompile()
    for module in graphs(model).values():
        for target in targets:
            if _has(module, target):
                module.delete_submodule(target)
    kept = {site: decided for site, decided in plan.items() if site not in dropped}
    smaller_plan = replace(plan, sites=kept, unquantized={**plan.unquantized, **dropped})
    quantizers = {site: simulation.quantizers[site] for site in kept}
    return replace(simulation, model=model, plan=smaller_plan, quantizers=quantizers,
                   dropped={**simulation.dropped, **dropped})


def _has(module: nn.Module, path: str) -> bool:
    try:
        module.get_submodule(path)
    except AttributeError:
        return False
    return True
