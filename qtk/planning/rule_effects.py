"""Finds the rules that decide nothing, and says what overrules each.

A rule has an effect if what it says of a weight, bias, input or output holds for at least one tensor that it matches,
also where that would hold without it: a rule may say what a default says too. A rule marked optional need not have one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import fx

from qtk.config.schema import Rule
from qtk.core.dtypes import INT32
from qtk.core.site import Site
from qtk.errors import ConfigError
from qtk.graph.flow import maker
from qtk.graph.sites import COMPOSITE, Port, edge_site, exclusion, label, ports, value_site
from qtk.planning.decision import Decision
from qtk.planning.draft import Draft, RuleRequest, TensorRole, agrees
from qtk.planning.rules import Matchable, Rules, acts_from_members, matches, wanted
from qtk.registry import did_you_mean

ROLES: tuple[TensorRole, ...] = ("weight", "bias", "input", "output")

SHOWN = 3
"""Reasons that are listed for each rule."""


def check_rules(drafts: Sequence[Draft], rules: Rules, removed_sites: Mapping[Site, str]) -> None:
    """Checks that every rule that is not optional decides something.

    Args:
        drafts: of all graphs of the model, finished.
        rules: their rules.
        removed_sites: the values that transforms removed from the graphs, each with the reason.

    Raises: ConfigError listing the rules that decide nothing, each with what overrules it.
    """
    required = [(index, rule) for index, rule in enumerate(rules.config.rules) if not rule.optional]
    every = [draft for outer in drafts for draft in _with_nested(outer)]
    effects = {
        (index, request.role)
        for draft in every for request in draft.requests if _is_met(draft, request) for index in request.decision.rules
    }
    ops = [(draft, draft.matchable(node)) for draft in every for node in draft.graph.nodes if _is_op(node)]
    problems = [
        problem for index, rule in required for problem in _problems(index, rule, ops, rules, effects, removed_sites)
    ]
    if problems:
        count = f"{len(problems)} rules have no effect" if len(problems) > 1 else "a rule has no effect"
        raise ConfigError("\n  ".join([f"{count}:", *problems]) + "\ncorrect or remove it, or mark it optional: true "
                          "if it need not apply to every model")


def _with_nested(draft: Draft) -> Iterator[Draft]:
    yield draft
    for nested in draft.nested.values():
        for inner in nested:
            yield from _with_nested(inner)


def _is_met(draft: Draft, request: RuleRequest) -> bool:
    plan = draft.planned(request.keys)
    if plan is None or request.plan is None:
        return plan is None and request.plan is None
    return agrees(plan, request.plan, request.decision)


def _problems(
    index: int, rule: Rule, ops: Sequence[tuple[Draft, Matchable]], rules: Rules,
    effects: set[tuple[int, TensorRole]], removed_sites: Mapping[Site, str],
) -> Iterator[str]:
    """Returns what is wrong with one rule: its conditions, or each of its settings that decides nothing."""
    if rule.inside is not None:
        ops = [*ops, *((draft, part) for draft, op in ops if op.node in draft.nested for part in draft.parts(op.node))]
    if rule.weight is not None or rule.bias is not None:
        ops = [*ops, *((draft, each) for draft, op in ops if op.node in draft.nested and not op.part
                       for each in draft.parameters(op.node))]
    matched = [(draft, op) for draft, op in ops if matches(rule, op)]
    conditions = f"rules[{index}] ({wanted(rule)})"
    paths = {path for _, op in ops for path in op.paths}
    unknown = [glob for glob in rule.match.path if not any(fnmatchcase(path, glob) for path in paths)]
    if unknown or not matched:
        yield f"{conditions}: " + "; ".join(
            [_unknown_path(glob, paths, removed_sites) for glob in unknown] or [_no_op(rule, [op for _, op in ops])]
        )
        return
    for role in ROLES:
        if getattr(rule, role) is None or (index, role) in effects or _is_final(rules, role, index, matched):
            continue
        reasons = dict.fromkeys(reason for draft, op in matched for reason in _overruled(draft, op, role, index))
        more = f"; and {len(reasons) - SHOWN} more" if len(reasons) > SHOWN else ""
        yield f"rules[{index}].{role} ({wanted(rule)}): " + "; ".join(list(reasons)[:SHOWN]) + more
    if rule.inside is not None and not any(op.node in draft.nested for draft, op in matched):
        yield f"{conditions}: {_name(matched[0][1].node)} has no inside; only recurrent nets and attention have"


def _is_op(node: fx.Node) -> bool:
    return node.op in ("placeholder", "call_function", "call_module") and maker(node) is node


def _is_final(rules: Rules, role: TensorRole, index: int, matched: Sequence[tuple[Draft, Matchable]]) -> bool:
    """Says whether the caller's width of ``None`` leaves what a rule sets in float, whatever rules say.

    An int32 bias has the scale of weight times input, so that it needs both.
    """
    if role == "bias":
        biases = ((draft.rules.decisions(op) if op.part else draft.decisions(op.node)).bias for draft, op in matched)
        return (rules.weight.is_final or rules.activation.is_final) and any(
            index in bias.rules and bias.setting.dtype == INT32.name for bias in biases
        )
    return rules.weight.is_final if role == "weight" else rules.activation.is_final


def _unknown_path(glob: str, paths: set[str], removed_sites: Mapping[Site, str]) -> str:
    reason = next((why for site, why in removed_sites.items() if fnmatchcase(site.owner, glob)), None)
    if reason is not None:
        return f"no op has the path {glob}: {reason}"
    if any(fnmatchcase(path, f"{glob}.*") for path in paths):
        return f"no op has the path {glob}: it is a module around others; write {glob}.*"
    hint = did_you_mean(glob.strip("*?"), sorted(filter(None, paths)), most=3)
    return f"no op has the path {glob}" + (f"; {hint}" if hint else ", nor one like it; print(sim.plan) shows them all")


def _no_op(rule: Rule, ops: Sequence[Matchable]) -> str:
    if rule.match.path:
        at_path = [op for op in ops if any(fnmatchcase(path, glob) for path in op.paths for glob in rule.match.path)]
        excluded = next((op.node for op in at_path if exclusion(op.node)), None)
        if excluded is not None:
            return f"{_name(excluded)} is {exclusion(excluded)}"
        there = {name for op in at_path for name in op.names}
        conditions = wanted(rule.model_copy(update={"match": rule.match.model_copy(update={"path": ()})}))
        kinds = ", ".join(sorted(there)) or "no op of the op table"
        return f"no op at path {', '.join(rule.match.path)} meets {conditions}; there: {kinds}"
    return "the model has no such op"


def _overruled(draft: Draft, op: Matchable, role: TensorRole, index: int) -> Iterator[str]:
    """Says why the ``role`` setting of a rule decides nothing at an op that it matches."""
    node = op.node
    if reason := exclusion(node):
        yield f"{_name(node)} is {reason}"
        return
    if op.part and role in ("input", "output"):
        yield (f"{op.parameter or op.paths[-1]} is a part of {_name(node)}, of which rules set weight, bias and "
               f"inside; match {_name(node)}, or an op inside it")
        return
    if role == "output":
        values = [user for user in node.users if maker(user) is node and user is not node] or [node]
        yield from (_overruled_output(draft, node, value, index) for value in values)
        return
    found = list(_ports(draft, node, role))
    if not found:
        yield f"{_name(node)} has no {role}" + (" that can be quantized" if role == "input" else "")
    for port in found:
        decision: Decision = getattr(draft.decisions(node) if role == "input" else draft.of_parameter(port), role)
        source = draft.flow.root(port.value)
        if index not in decision.rules:
            yield _later(value_site(source), decision, index)
        elif role == "input" and source in draft.values:
            yield _at_producer(draft, source, decision)
        else:
            yield _outcome(draft, source, port)


def _at_producer(draft: Draft, source: fx.Node, decision: Decision) -> str:
    site = value_site(source)
    if decision.enabled:
        return f"{site}, which it reads, is quantized at its producer: {draft.values[source].reason}"
    if draft.flow.is_parameter(source):
        return f"{site}, a constant which it reads, stays in float where all other values that it reads do"
    return (f"{site}, which it reads, is quantized at its producer, for all readers; to change that, match path "
            f"{_name(source)}, and output: float")


def _ports(draft: Draft, node: fx.Node, role: TensorRole) -> Iterator[Port]:
    formula = draft.formulas.get(node)
    if formula is not None and role != "input":
        parameter = formula.weight if role == "weight" else formula.bias
        yield from (port for port in ports(node) if parameter is not None and port.value is parameter)
    elif formula is None:
        flow = draft.flow
        yield from {"weight": flow.weight_ports, "bias": flow.bias_ports, "input": flow.data_ports}[role](node)


def _overruled_output(draft: Draft, node: fx.Node, value: fx.Node, index: int) -> str:
    source, last = draft.flow.root(value), draft.last_of(node)
    if source is not value:
        return f"{_name(node)} moves the values of {value_site(source)}; match that op"
    if last is not node:
        if not acts_from_members(draft.rules.config.rules[index]):
            within = draft.floats.get(node, "inside another op")
            return (f"{value_site(value)} is {within}, whose output is {value_site(last)}; match that op, or give the "
                    "rule a path and a width")
        node, value = maker(last), last
    site, decision = value_site(value), draft.decisions(node).output
    if index not in decision.rules:
        return _later(site, decision, index)
    if node in draft.nested and value not in draft.values:
        names = {label(inner, COMPOSITE) for graph in draft.nested[node] for inner in graph.graph.nodes}
        return f"{site} is quantized inside; match op {' or '.join(sorted(filter(None, names)))}"
    return _outcome(draft, value, None)


def _later(site: Site, decision: Decision, index: int) -> str:
    if decision.rules and max(decision.rules) > index:
        return f"{site} follows {decision.reason}, which comes later"
    return f"{site} is float by {decision.reason}; give the rule a width, or quantized"


def _outcome(draft: Draft, value: fx.Node, port: Port | None) -> str:
    """Returns what became of a tensor."""
    site = value_site(value)
    plan = draft.planned(((edge_site(port),) if port is not None else ()) + (value,))
    if plan is not None and plan.leader is not None:
        return f"{site} shares the encoding of {plan.leader}; match that op"
    if plan is not None:
        return f"{site} is quantized otherwise: {plan.reason}"
    return f"{site} stays in float: {draft.floats.get(value, 'no op computes with it')}"


def _name(node: fx.Node) -> str:
    return value_site(node).name.partition(":")[0]
