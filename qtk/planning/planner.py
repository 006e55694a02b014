"""Makes the quantization plan of a model: which values are quantized, and how. The graph does not change.

The rules, numbered as the code cites them:

1. A value made by a compute op gets one quantizer, at its producer, for all readers.
2. Model inputs, and buffers that forward writes, that an op reads likewise, unless ``io.inputs`` is ``float``.
3. Inside a supergroup, and inside a formula spelled out in small ops, only the last value is quantized.
4. A parameter at a weight port gets the weight setting, its channel axis followed back through reshapes; at a bias
   port the bias setting; at any other port of a compute op it is a constant and gets the activation setting, or stays
   in float where activations are quantized dynamically: a constant has no range of its own at run time.
5. A merge (concat, stack, where, scatter) and the values it merges share the encoding of its output. A value that is
   also read elsewhere keeps its own quantizer, and the edge into the merge gets the shared one. Scales of an axis are
   shared where that axis is: on the edge of a value that is moved first, which is rounded there alone. Dynamic
   quantization shares nothing. Unless a rule asks for it, a merge stays in float, and what it merges keeps its own
   ranges, where no op with weights or matrix product reads it, and only outputs or float ops do, or it is none of
   concat and stack: no runtime has integer kernels for the others, and boxes beside scores would leave the scores one
   code.
6. The value of an op the table does not know is quantized where a known op reads it.
7. An edge gets a quantizer of its own only where a reader asks for another spec than the producer has.
8. Movement ops, integers, booleans and shapes get nothing.
9. A value that is only divided by is left in float: rounded to 0 it would make the result infinite.
10. The graphs inside a composite (attention, a recurrent net) are planned by the same rules, so that its outputs need
    no quantizer of their own. Its weights and inputs are quantized outside it.
11. A channel scale (SmoothQuant) reads a value before that is rounded. A value that only channel scales read is left
    in float, inside whatever supergroup it ends.
12. A rule with ``feeds`` sets a value, and the constants added to it, for the ops that it names; an op with weights,
    or a matrix product, that reads the value gets it on its edge as it would be without the rule, but a product with
    positive weights whose result they read (mel filters in front of a logarithm).
13. A bias set to int32 is int32 where its op multiplies integer codes; it then has the scale of the products.
14. A value or parameter that an excluded module reads too stays in float, and so does a parameter that its readers
    want in several formats; the (other) readers get it on their edges, rounded once, a parameter in the axes that each
    reads. What only data selects from such a parameter stays in float.
15. Counts, indices, offsets and masks stay in float whatever their type, and so do constants that they are added to.
    Casts of integer inputs, and what arithmetic makes of these, are data where an op with weights reads them.
16. What indices select from a parameter, and what it is expanded to, is a parameter to the op that reads it.
17. A loss that the model computes from targets stays in float, and so do the targets.
18. Of several graphs of one module, for calls with other inputs, the first decides about what it computes; the others
    about what they alone compute. What a layer reads in each has one encoding, and what it makes.
19. What only sines, floors, remainders and casts to integers read, directly or behind sums and products, stays in
    float: its absolute error counts, and a step of its range may be a turn.
20. Keys and values of attention are quantized as ``kv_cache`` says, whatever rules say, where they have heads and are
    not repeated yet; a cache that is merged with new ones, in whichever graph, has one encoding with them.
21. A value in blocks is rounded on the edges of the products that read it, along the axis that each sums over; other
    readers get it in float, and so it stays where none reads it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import fx

from qtk.capture.prepared_model import PreparedModel, parameters_outside, refuse_unreached
from qtk.config.schema import Io, QuantConfig
from qtk.core.needs import concerned, found_where
from qtk.core.plan import QuantPlan, SitePlan
from qtk.core.site import Site
from qtk.core.width import Width
from qtk.errors import CaptureError, ConfigError, SpecError
from qtk.graph.graphs import roots
from qtk.graph.sites import OWNER, edge_site, label, ports, value_site
from qtk.operators.contents import Trait
from qtk.operators.lookup import PAD_WITH_VALUE, op_name
from qtk.operators.op_row import Role
from qtk.planning.draft import Draft
from qtk.planning.plan_biases import plan_biases
from qtk.planning.plan_composites import plan_composites
from qtk.planning.plan_edges import plan_edges
from qtk.planning.plan_parameters import explain_unread_parameters, plan_parameters
from qtk.planning.plan_values import plan_values
from qtk.planning.rule_effects import check_rules
from qtk.planning.rules import Fact, Rules
from qtk.planning.share_merges import share_merges
from qtk.planning.shared_ports import share_ports

SHOWN = 5
"""Reasons that an error lists."""

SHARE, LISTED = 0.1, 3
"""Of the parameters, from which a warning is due that they stay in float, and how many that lists."""


def plan(
    model: PreparedModel,
    config: QuantConfig,
    *,
    weight_bits: Width,
    activation_bits: Width,
    scheme: str,
    removed_sites: Mapping[Site, str] = MappingProxyType({}),
) -> QuantPlan:
    """Decides every site of a prepared model.

    Args:
        model: the model.
        config: the settings.
        weight_bits: as for ``QuantSim``; likewise ``activation_bits`` and ``scheme``.
        activation_bits: likewise.
        scheme: likewise.
        removed_sites: the values that transforms removed from the model, each with the reason.

    Raises: SpecError listing every tensor whose shape does not fit its granularity, or on contradictory settings;
        ConfigError if a width contradicts the config, if a rule, or ``kv_cache``, has no effect, or if nothing would be
        quantized though the config asks for it; CaptureError if the example inputs did not reach a module with
        parameters that is not excluded, or an op with weights reads sparse tensors.
    """
    refuse_unreached(model, config.exclude)
    rules = Rules(config, weight_bits=weight_bits, activation_bits=activation_bits)
    graphs = roots(model)
    io = config.io if "" in graphs else Io()  # islands have other inputs and outputs than the model
    is_island = "" not in graphs
    words = frozenset[int]()
    if any(rule.match.lm_head is not None for rule in config.rules):
        from qtk.planning.language_heads import vocabularies  # loaded here: few configs speak of heads

        words = vocabularies(graph.graph for graph in graphs.values())
    drafts = [Draft(graph.graph, rules, scheme, io, is_island=is_island, vocabularies=words)
              for graph in graphs.values()]
    if any(rule.match.lm_head for rule in config.rules) and not any(draft.heads for draft in drafts):
        from qtk.planning.language_heads import warn_without_heads

        of = {node: draft for draft in drafts for node in draft.graph.nodes}
        warn_without_heads(model, [(draft.graph, draft.flow) for draft in drafts],
                           lambda node: of[node].decisions(node).weight.enabled)
    for draft in drafts:
        _refuse_other_numbers(draft)
        run_passes(draft)
    misfits = [line for draft in drafts for line in draft.misfits]
    if misfits:
        raise SpecError(
            "\n  ".join(["granularities that do not fit:", *misfits])
            + "\ngive these sites another block_size or granularity by a rule, e.g. {match: {path: …}, weight: "
            "{granularity: per_channel}}"
        )
    sites: dict[Site, SitePlan] = {}
    unquantized: dict[Site, str] = {}
    for draft in drafts:  # rule 18
        planned, left_out = draft.in_order(), draft.left_out()
        decided = {*sites, *unquantized}
        sites |= {site: plan for site, plan in planned.items() if site not in decided}
        unquantized |= {site: reason for site, reason in left_out.items() if site not in decided}
    if len(drafts) > 1:
        sites = share_ports(drafts, sites)
    if config.kv_cache is not None:
        from qtk.planning.plan_caches import share_caches  # loaded here: few configs speak of caches

        sites = share_caches(drafts, sites)
    sites = {site: plan for site, plan in sites.items() if site not in unquantized}
    while lost := _follows_nothing(sites):
        unquantized |= lost
        sites = {site: plan for site, plan in sites.items() if site not in lost}
    unquantized |= {Site.parameter(name): reason for name, reason in parameters_outside(model).items()}
    if not sites and rules.quantizes:
        reasons = [f"{site}: {reason}" for site, reason in unquantized.items()][:SHOWN]
        raise ConfigError("\n  ".join(["nothing of this model would be quantized:", *reasons]) + "\ncheck the rules of "
                          "the config, and the model's report: print(qtk.prepare_model(model, example_inputs).report)")
    found_where({Fact.REQUIRED_RULES}, rules.facts, lambda: check_rules(drafts, rules, removed_sites), None)
    warn_of_weights_in_float(drafts)
    _warn_of_tied_weights(drafts)
    return QuantPlan(sites, {**unquantized, **removed_sites})


def _follows_nothing(sites: Mapping[Site, SitePlan]) -> dict[Site, str]:
    """The sites that share the encoding of a site in float, each with the reason: a later graph planned them."""
    reasons: dict[Site, str] = {}
    for site, decided in sites.items():
        missing = [each for each in (decided.leader, *(decided.factors or ())) if each and each not in sites]
        if missing:
            reasons[site] = f"encoded with {missing[0]}, which the graph of the example inputs leaves in float"
    return reasons


def _refuse_other_numbers(draft: Draft) -> None:
    """Raises: CaptureError naming the first op with weights that reads sparse tensors."""
    for node in draft.graph.nodes:
        row = draft.flow.row(node)
        for port in ports(node) if row is not None and (row.weights or row.multiplies) else ():
            layout = port.value.meta["val"].layout
            if layout is not torch.strided:
                owner = label(node, OWNER)
                way = "leave" if owner else "put it into a module of its own and leave"
                raise CaptureError(
                    f"{value_site(node)}: {op_name(node)} reads {str(layout).removeprefix('torch.')} tensors "
                    f"({value_site(port.value)}); only dense tensors can be quantized; {way} its "
                    "module in float: qtk.prepare_model(model, example_inputs, "
                    f"modules_to_exclude=[{owner or 'its path'!r}])"
                )


@dataclass(frozen=True, slots=True)
class PlanningPass:
    """One pass of the planner.

    Args:
        run: decides sites of a draft.
        needs: of the draft's ``contents``; a draft with none of these it leaves as it is. Empty: it acts on every one.
    """

    run: Callable[[Draft], None]
    needs: frozenset[object] = frozenset()


def run_passes(draft: Draft) -> None:
    """Runs the passes that concern one graph, and on the graphs inside its composites theirs, in their order."""
    for each in concerned(PASSES, lambda: draft.contents):
        each.run(draft)


def _plan_caches(draft: Draft) -> None:
    from qtk.planning.plan_caches import plan_caches  # loaded here: few configs speak of caches

    plan_caches(draft)


PASSES = (
    PlanningPass(lambda draft: plan_composites(draft, run_passes), frozenset({Trait.COMPOSITES})),
    PlanningPass(plan_values),
    PlanningPass(plan_parameters),
    PlanningPass(_plan_caches, frozenset({Fact.KV_CACHE})),
    PlanningPass(share_merges, frozenset({Role.MERGE, PAD_WITH_VALUE.kind})),
    PlanningPass(plan_edges, frozenset({Fact.SET_INPUTS, Fact.BLOCKS, Fact.STREAMS, Fact.EXCLUSIONS})),
    PlanningPass(plan_biases, frozenset({Fact.INT32_BIASES})),
    PlanningPass(explain_unread_parameters),
)
"""In the order that their docs require."""


def _warn_of_tied_weights(drafts: Sequence[Draft]) -> None:
    """Warns of a weight that a rule leaves in float for one op, and that another op, which has the same, quantizes."""
    said: dict[str, str] = {}
    for draft in drafts:
        for request in draft.requests:
            if request.role != "weight" or request.plan is not None or draft.planned(request.keys) is None:
                continue
            edge, node = (str(key) if not isinstance(key, fx.Node) else str(value_site(key)) for key in request.keys)
            said.setdefault(node, f"{node} is quantized for {edge.partition(':')[0]} too, which reads the same tied "
                                  f"weight and whose rule says float ({request.decision.reason})")
    if said:
        more = f"; and {len(said) - 1} more" if said.keys() - {next(iter(said))} else ""
        warnings.warn(f"{next(iter(said.values()))}{more}; give all ops that read it one rule, or the model two "
                      "parameters", stacklevel=6)


def warn_of_weights_in_float(drafts: Sequence[Draft]) -> None:
    """Warns if more than ``SHARE`` of the parameters, counted one by one, stays in float though no rule says so."""
    asked: dict[fx.Node, int] = {}
    left: dict[fx.Node, str] = {}
    for draft in drafts:
        for node in draft.graph.nodes:
            if draft.flow.is_static(node):
                continue  # a parametrization
            for port in draft.flow.weight_ports(node):
                if not draft.of_parameter(port).weight.enabled:
                    continue
                root = draft.flow.root(port.value)
                asked[root] = root.meta["val"].numel()
                if draft.planned((root, port.value, edge_site(port))) is None:
                    left[root] = draft.floats.get(root, "it is read in a way that has no format")
    elements, total = sum(asked[node] for node in left), sum(asked.values())
    if elements > SHARE * total:
        listed = "; ".join(f"{value_site(node)}: {reason}" for node, reason in list(left.items())[:LISTED])
        more = f"; and {len(left) - LISTED} more" if len(left) > LISTED else ""
        warnings.warn(
            f"{elements / total:.0%} of the weights that the config asks for stay in float ({len(left)} of "
            f"{len(asked)} tensors): {listed}{more}", stacklevel=7,
        )
