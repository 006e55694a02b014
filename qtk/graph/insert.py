"""Puts quantizers on the sites of a plan, and takes them out again: ``remove(insert(g)) == g``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import fx

from qtk.core.plan import QuantPlan
from qtk.core.site import Site
from qtk.errors import EncodingError
from qtk.graph.sites import SITE, Port, annotate, edge_site, ports, value_site
from qtk.quantizers.quantizer import Quantizer

QUANTIZERS = "qtk_quantizers"
"""The submodule that holds every quantizer, each under its site's name."""


def quantizer_target(site: Site) -> str:
    """The module path of the quantizer of ``site``."""
    return f"{QUANTIZERS}.{site.name}"


def insert(model: fx.GraphModule, plan: QuantPlan) -> dict[str, Quantizer]:
    """Adds one quantizer for every leader of ``plan`` and calls it at the leader and its followers.

    Changes ``model``. Returns: site name → quantizer, in plan order; followers map to their leader's.

    Raises: EncodingError if the plan names a site the graph does not have.
    """
    values, edges = _locations(model.graph)
    missing = [site.name for site in plan if site not in values and site not in edges]
    if missing:
        raise EncodingError(f"the plan belongs to another model: no such sites: {', '.join(missing[:5])}")
    for site, decided in plan.items():
        if decided.leader is None:
            cache = decided.static and site in values
            model.add_submodule(quantizer_target(site), Quantizer(decided.spec, site=site.name, cache=cache))
    quantizers = {}
    for site, decided in plan.items():
        target = quantizer_target(decided.leader or site)
        if site in values:
            _after(values[site], target, site)
        else:
            _on_edge(edges[site], target, site)
        quantizer = model.get_submodule(target)
        assert isinstance(quantizer, Quantizer)
        quantizers[site.name] = quantizer
    model.recompile()
    return quantizers


def remove(model: fx.GraphModule) -> None:
    """Takes every quantizer out again. Changes ``model``, back to what it was before ``insert``."""
    for node in quantizer_nodes(model):
        (value,) = node.args
        assert isinstance(value, fx.Node)
        node.replace_all_uses_with(value)
        model.graph.erase_node(node)
    if hasattr(model, QUANTIZERS):
        model.delete_submodule(QUANTIZERS)
    model.recompile()


def quantizer_nodes(model: fx.GraphModule) -> list[fx.Node]:
    """The calls of quantizers, in graph order."""
    return [
        node for node in model.graph.nodes
        if node.op == "call_module" and isinstance(model.get_submodule(str(node.target)), Quantizer)
    ]


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
    annotate(node, **{SITE: site.name})
    node.meta["val"] = value.meta["val"]
    if "nn_module_stack" in value.meta:
        node.meta["nn_module_stack"] = value.meta["nn_module_stack"]
    return node


def _after(value: fx.Node, target: str, site: Site) -> None:
    with value.graph.inserting_after(value):
        call = _call(target, value, site)
    value.replace_all_uses_with(call, delete_user_cb=lambda user: user is not call)


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


def drop_sites(model: fx.GraphModule, plan: QuantPlan, reasons: Mapping[Site, str]) -> QuantPlan:
    """Takes the quantizers of some sites, and of all sites they share with, out of model and plan.

    Changes ``model``. Returns: the plan without them, each listed as unquantized with its reason.
    """
    leaders = {plan[site].leader or site: reason for site, reason in reasons.items()}
    gone = {site: leaders[leader] for site in plan if (leader := plan[site].leader or site) in leaders}
    targets = {quantizer_target(leader) for leader in leaders}
    for node in quantizer_nodes(model):
        if node.target in targets:
            node.replace_all_uses_with(node.all_input_nodes[0])
            model.graph.erase_node(node)
    for target in targets:
        model.delete_submodule(target)
    model.recompile()
    kept = {site: decided for site, decided in plan.items() if site not in gone}
    return replace(plan, sites=kept, unquantized={**plan.unquantized, **gone})
