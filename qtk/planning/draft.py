"""The unfinished plan of one graph, which the passes of the planner read and write."""

from __future__ import annotations

import math
from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeAlias, TypeVar

from torch import fx

from qtk.calls.inputs import is_free
from qtk.config.schema import Io
from qtk.config.tensor_setting import TensorSetting
from qtk.core.dtypes import FloatDtype
from qtk.core.granularity import PerChannel
from qtk.core.needs import found_where
from qtk.core.plan import SitePlan
from qtk.core.site import Site
from qtk.core.spec import QuantSpec
from qtk.errors import SpecError
from qtk.graph.absolute import absolute_values
from qtk.graph.flow import Flow, is_result, maker
from qtk.graph.graphs import nested_graphs
from qtk.graph.sites import Port, edge_site, exclusion, is_float, ports, value_site
from qtk.graph.value_kinds import ValueKind, value_kinds
from qtk.operators.contents import Trait, contents
from qtk.operators.lookup import op_name
from qtk.operators.op_row import Precision, Role
from qtk.operators.op_table import ACCUMULATOR, PYTHON, RECURRENT
from qtk.planning.adapters import SUMS, adapter_ops
from qtk.planning.decision import Decision
from qtk.planning.feeds import OUTPUT, Feeds
from qtk.planning.image_gates import GATED, is_image_gate
from qtk.planning.patterns import PatternMatch, match_patterns
from qtk.planning.recurrent_profiles import DEFAULT, Profile, profiled
from qtk.planning.rules import Fact, Matchable, OpDecisions, Rules, to_spec
from qtk.planning.state_pairs import next_values
from qtk.planning.supergroups import match_supergroups

TensorRole: TypeAlias = Literal["weight", "bias", "input", "output"]
"""What a tensor is to the op that a rule matches; the key of the rule's setting."""

Key: TypeAlias = fx.Node | Site
"""Of the plan of a value, or of an edge."""

Found = TypeVar("Found")

FEW_BITS = 4
"""Bits of a parameter whose largest values cost the others more than they are worth."""

OF_FORMULAS = frozenset({"mul", "div", "neg", "pow"})
OF_COUNTS = frozenset({Trait.INTEGERS, Role.COUNT, Role.CREATE, Trait.WRITES})
OF_ABSOLUTE_VALUES = frozenset({Trait.INTEGERS, Precision.FRACTION})
OF_ADAPTERS = SUMS
OF_CELLS = frozenset({"lstm", Fact.NESTED})
"""What the analyses of a graph need: all that they find has one of these."""


@dataclass(frozen=True, slots=True)
class RuleRequest:
    """What a decision asks for one tensor; whether it comes true shows when all passes have run.

    Args:
        role: what the tensor is to its op.
        decision: the decision.
        keys: where the tensor's plan is: the first of these that has one.
        plan: the plan asked for; ``None`` for float.
    """

    role: TensorRole
    decision: Decision
    keys: tuple[Key, ...]
    plan: SitePlan | None


class Draft:
    """The decisions made so far about the values of one graph; the graph itself does not change.

    ``values``: node → plan of its value. ``edges``: site of an edge → its plan. ``floats``: node whose value stays in
    float → reason. ``held``: node whose value stays in float for an excluded module that reads it → the plan that its
    other readers get on their edges. ``split``: parameter that its readers want in several formats → reason.
    ``nested``: call of a composite → drafts of the graphs inside it. ``misfits``: a line for every tensor whose shape
    does not fit its granularity. ``formulas``: op → the match of the formula that it is part of. ``groups``: op → its
    supergroup. ``requests``: what decisions that follow a rule ask for. ``contents``: what passes may need (``Fact``,
    ``qtk.operators.contents``). ``absolute``: values whose
    absolute error counts, however wide their range. ``in_blocks``: values that are rounded in blocks, on the edges of
    the products that read them, along the axes that these sum over. ``caches``: for the keys, and the values, of each
    attention a name, which is the same in all graphs, and the sites that round them. ``cached``: the merges of these.

    Args:
        graph: the graph.
        rules: the configuration.
        scheme: the default scheme.
        io: whether the graph's inputs and outputs are quantized; ``None`` for a graph inside a composite: its inputs
            are quantized outside, and no formulas are matched in it.
        float_outputs: why the graph's outputs stay in float; ``None`` if they need not.
        profile: how the values of a recurrent cell are quantized, where the graph is inside one.
        is_island: whether the graph is called by the model's own Python.
        vocabularies: the numbers of rows of the model's embeddings, where rules speak of heads of language models.
    """

    def __init__(
        self, graph: fx.Graph, rules: Rules, scheme: str, io: Io | None, *, float_outputs: str | None = None,
        profile: Profile = DEFAULT, is_island: bool = False, vocabularies: frozenset[int] = frozenset(),
    ) -> None:
        self.graph = graph
        self.rules = rules
        self.scheme = scheme
        self.io = io
        self.float_outputs, self.profile = float_outputs, profile
        self.flow = Flow(graph, is_nested=io is None)
        self.contents = contents(graph.nodes) | rules.facts
        self._is_island = is_island
        self.formulas: dict[fx.Node, PatternMatch] = {}
        if io is not None:
            matches: list[PatternMatch] = self._found(OF_FORMULAS, lambda: match_patterns(graph), [])
            self.formulas = {node: match for match in matches if not self._is_split(match) for node in match.nodes}
        self._natures: dict[fx.Node, ValueKind] = self._found(OF_COUNTS, lambda: value_kinds(graph, self.flow), {})
        self.absolute: set[fx.Node] = self._found(
            OF_ABSOLUTE_VALUES, lambda: absolute_values(graph, self.flow), set())
        self._adapters: frozenset[fx.Node] = self._found(
            OF_ADAPTERS, lambda: adapter_ops(graph, self.flow), frozenset())
        self.heads: frozenset[fx.Node] = frozenset()
        if vocabularies:
            from qtk.planning.language_heads import language_heads  # loaded here: few configs speak of heads

            self.heads = language_heads(graph, self.flow, vocabularies)
        ends = {*OUTPUT, *(match.kind for match in self.formulas.values()), *self.contents}
        ends |= {PYTHON} if is_island else set()
        states = next_values(graph.owning_module) if ACCUMULATOR in rules.fed and graph.owning_module else {}
        ends |= {ACCUMULATOR} if states else set()
        self.feeds = found_where(
            rules.fed, ends, lambda: Feeds(graph, self.flow, self.formulas, states, is_island=is_island), None)
        is_excluded = float_outputs is not None or any(exclusion(node) for node in graph.nodes)
        facts = {Fact.STREAMS: self.feeds is not None, Fact.EXCLUSIONS: is_excluded, Fact.NESTED: io is None}
        self.contents |= {fact for fact, holds in facts.items() if holds}
        groups = match_supergroups(graph, self.flow, rules.config.supergroups, self.formulas)
        self.groups = {node: group for group in groups for node in group.nodes}
        self._matchables: dict[fx.Node, Matchable] = {}
        self._members: dict[fx.Node, list[fx.Node]] = {}
        for node in {**self.groups, **self.formulas}:
            if (last := self.last_of(node)) is not node:
                self._members.setdefault(maker(last), []).append(node)
        self.nested: dict[fx.Node, list[Draft]] = {}
        self.values: dict[fx.Node, SitePlan] = {}
        self.edges: dict[Site, SitePlan] = {}
        self.floats: dict[fx.Node, str] = {}
        self.held: dict[fx.Node, SitePlan] = {}
        self.split: dict[fx.Node, str] = {}
        self.misfits: list[str] = []
        self.requests: list[RuleRequest] = []
        self.in_blocks: set[fx.Node] = set()
        self.caches: list[list[Site]] = []
        self.cached: set[fx.Node] = set()

    def decisions(self, op: fx.Node) -> OpDecisions:
        """The settings for an op or graph input; an op of a formula is matched as the op that the formula computes."""
        members = [self.matchable(member) for member in self._members.get(op, ())]
        output = self._found(OF_CELLS, lambda: profiled(self.rules.activation, op, self.profile,
                                                        is_cell_state=op in self.cell_states), None)
        return self.rules.decisions(self.matchable(op), members, output=output)

    def _found(self, needs: Set[object], analysis: Callable[[], Found], otherwise: Found) -> Found:
        return found_where(needs, self.contents, analysis, otherwise)

    @cached_property
    def cell_states(self) -> set[fx.Node]:
        """The values that an LSTM takes for its first cell state, where its profile gives that state more bits."""
        lstms = [node for node in self.graph.nodes if self.flow.row(node) is RECURRENT["lstm"] and maker(node) is node]
        calls = [node for node in lstms if self.rules.inside(self.matchable(node))[0] == DEFAULT]
        return {self.flow.root(port.value) for call in calls for port in ports(call) if (port.arg, port.item) == (1, 1)}

    def matchable(self, op: fx.Node) -> Matchable:
        """The op as rules see it."""
        if op not in self._matchables:
            formula = self.formulas.get(op)
            kind = formula.kind if formula is not None else None
            feeds = frozenset[str]() if self.feeds is None else self.feeds.names(op)
            self._matchables[op] = Matchable(op, self.flow, feeds, kind,
                                             in_adapter=op in self._adapters, is_lm_head=op in self.heads,
                                             is_accumulator=self.feeds is not None and op in self.feeds.accumulators,
                                             in_island=self._is_island)
        return self._matchables[op]

    def parts(self, composite: fx.Node) -> list[Matchable]:
        """The layers of a recurrent net, in each direction, as rules with ``inside`` see them."""
        names = dict.fromkeys(path.rpartition(".")[0] for path in nested_graphs(composite))
        return [replace(self.matchable(composite), part=name) for name in names]

    def parameter(self, port: Port) -> Matchable:
        """The op that reads a weight or bias at ``port``, as rules that set this see it.

        That of a recurrent net has the paths of one layer and direction, ``lstm.l1``, and of the parameter,
        ``lstm.weight_ih_l1``.
        """
        read, parts = port.user.args[port.arg], self.parts(port.user) if nested_graphs(port.user) else []
        if port.item is None or not parts or not isinstance(read, (list, tuple)):
            return self.matchable(port.user)
        name = value_site(self.flow.root(port.value)).name
        return replace(parts[port.item * len(parts) // len(read)], parameter=name)

    def parameters(self, op: fx.Node) -> list[Matchable]:
        """As ``parameter``, of all weights and biases of an op."""
        return [self.parameter(port) for port in (*self.flow.weight_ports(op), *self.flow.bias_ports(op))]

    def of_parameter(self, port: Port) -> OpDecisions:
        """The settings for the op that reads a weight or bias at ``port``, as far as they are of this parameter."""
        matchable = self.parameter(port)
        return self.rules.decisions(matchable) if matchable.part else self.decisions(port.user)

    def last_of(self, node: fx.Node) -> fx.Node:
        """The op that computes the output of the formula and the supergroup that ``node`` is in."""
        formula = self.formulas.get(node)
        last = node if formula is None else formula.nodes[-1]
        return self.groups[last].nodes[-1] if last in self.groups else last

    def request(self, role: TensorRole, decision: Decision, keys: tuple[Key, ...], plan: SitePlan | None) -> None:
        """Records what ``decision`` asks for, if it follows a rule."""
        if decision.rules:
            self.requests.append(RuleRequest(role, decision, keys, plan))

    def planned(self, keys: tuple[Key, ...]) -> SitePlan | None:
        """The plan that the first of ``keys`` with one has now; ``None`` if the tensor stays in float."""
        plans = (self.values.get(key) if isinstance(key, fx.Node) else self.edges.get(key) for key in keys)
        return next((plan for plan in plans if plan is not None), None)

    def _is_split(self, match: PatternMatch) -> bool:
        return self.rules.config.split_gates and match.kind in GATED and is_image_gate(match.nodes[-1])

    def decide(self, node: fx.Node, decision: Decision, why: str) -> None:
        """Records in ``values`` or ``floats`` whether and how ``decision`` quantizes the value of ``node``."""
        if decision.enabled and decision.setting.in_blocks:
            self.floats[node] = "in blocks, rounded where a product reads it"
            self.in_blocks.add(node)
        elif decision.enabled:
            plan = self.site_plan(self.activation_spec(node, decision), decision, why)
            reason = self.excluded_reader(node)
            if reason is None:
                self.values[node] = plan
            else:
                self.floats[node], self.held[node] = reason, plan
            edges = (edge_site(port) for port in self.flow.readers(node) if reason and not is_result(port))
            self.request("output", decision, (node, *edges), plan)
        else:
            self.floats[node] = f"float by {decision.reason}"

    def activation_spec(self, node: fx.Node, decision: Decision, summed_axis: int | None = None) -> QuantSpec:
        """The spec that ``decision`` asks for the value of ``node``; in ``misfits`` if that has no such axis."""
        shape, setting = node.meta["val"].shape, decision.setting
        try:
            spec = to_spec(setting, None, len(shape), summed_axis=summed_axis)
        except SpecError as error:
            if setting.axis is None:
                raise
            self.misfits.append(f"{value_site(node)}: {error}")
            return to_spec(setting.overlaid(TensorSetting(granularity="per_tensor")), None, len(shape))
        if isinstance(spec.granularity, PerChannel) and is_free(shape[spec.granularity.axis]):
            self.misfits.append(f"{value_site(node)}: axis {spec.granularity.axis} of {list(shape)} has no fixed "
                                "length, and so no scale for each index")
        return spec

    def site_plan(self, spec: QuantSpec, decision: Decision, why: str, *, static: bool = False) -> SitePlan:
        """The plan of a site: ``spec`` and the other settings of ``decision``.

        Parameters have no fixed range, nor have tensors whose ranges are found at run time.
        """
        known = None if static or spec.dynamic else decision.setting.range
        return SitePlan(
            spec,
            decision.setting.scheme or self._scheme_of(spec, static),
            static=static,
            range=None if known is None else (float(known[0]), float(known[1])),
            min_fill=0.0 if known is None else decision.setting.min_fill or 0.0,
            bounds=None if spec.dynamic else decision.setting.bounds,
            reason=f"{why}; {decision.reason}",
        )

    def _scheme_of(self, spec: QuantSpec, static: bool) -> str:
        """The scheme where no rule names one; for symmetric parameters in few bits a scheme that may clip."""
        is_few = static and spec.symmetric and not isinstance(spec.dtype, FloatDtype) and spec.dtype.bits <= FEW_BITS
        return "weight_mse" if is_few and self.scheme == "min_max" else self.scheme

    def counts(self, node: fx.Node) -> bool:
        """Says whether the value is of counts, indices or masks; integer inputs are, unless weights read them."""
        nature = self._natures.get(node, ValueKind.REAL)
        if nature is ValueKind.INTEGER and is_float(node):
            rows = [row for port in self.flow.readers(node) if (row := self.flow.row(port.user)) is not None]
            return not any(row.weights or row.multiplies for row in rows)
        return nature is ValueKind.COUNT

    def why_float(self, port: Port) -> str | None:
        """Says why what reads the value at ``port``, or its gradient, may be infinite if that is rounded, or None."""
        row = self.flow.row(port.user)
        power: object = port.user.args[1] if row is not None and row.kind == "pow" and port.arg == 0 else 1
        exponent = float(power) if isinstance(power, (int, float)) else math.nan
        if row is not None and (port.arg in row.divisors or exponent < 0):
            return "divides: a value that rounds to 0 would make the result infinite"
        if row is not None and (row.edged or not exponent.is_integer()):
            return "at the edge of where the function that reads it is real, which rounding may cross"
        return None

    def takes_data(self, port: Port) -> bool:
        """Says whether the reader computes with the value at ``port``, or merges it."""
        row = self.flow.row(port.user)
        if row is None or row.role not in (Role.COMPUTE, Role.MERGE):
            return False
        return any(other.index == port.index for other in self.flow.data_ports(port.user))

    def excluded_reader(self, node: fx.Node) -> str | None:
        """Says why the value of ``node`` stays in float: an excluded module reads it; ``None`` if none does."""
        for port in self.flow.readers(node):
            reason = self.float_outputs if port.user.op == "output" else exclusion(port.user)
            if reason is not None:
                return reason if port.user.op == "output" else f"read by {_path(port.user)}, {reason}"
        return None

    def unknown_readers(self, readers: list[Port]) -> str | None:
        """Says why a value with these readers stays in float: ops without a row read it; ``None`` if none does."""
        excluded = next((reason for port in readers if (reason := exclusion(port.user))), None)
        if excluded is not None:
            return excluded
        names = {op_name(port.user) for port in readers if not is_result(port) and self.flow.row(port.user) is None}
        return f"read by {', '.join(sorted(names))}, not in the op table" if names else None

    def share_edge(self, port: Port, site: Site) -> None:
        """Gives an edge the encoding of an earlier one at which the same value is read with the same spec.

        What moves a value leaves the range observed on data; a parameter's scales belong to the axes that one op reads.
        """
        if self.edges[site].spec.dynamic:
            return
        for reader in self.flow.readers(self.flow.root(port.value)):
            if edge_site(reader) == site or (self.edges[site].static and reader.value is not port.value):
                continue
            earlier = self.edges.get(edge_site(reader)) if reader.user.op != "output" else None
            if earlier is not None and earlier.spec == self.edges[site].spec:
                leader = earlier.leader or edge_site(reader)
                self.edges[site] = replace(self.edges[site], leader=leader, reason=f"the same value as {leader}")
                return

    def in_order(self) -> dict[Site, SitePlan]:
        """The quantized sites in graph order, parameters beside the op that reads them first."""
        ordered: dict[Site, SitePlan] = {}
        for node in self.graph.nodes:
            if node.op == "get_attr":
                continue
            for port in ports(node):
                if port.value.op == "get_attr" and port.value in self.values:
                    ordered.setdefault(value_site(port.value), self.values[port.value])
                if (site := edge_site(port)) in self.edges:
                    ordered[site] = self.edges[site]
            for draft in self.nested.get(node, ()):
                ordered |= draft.in_order()
            if node in self.values:
                ordered[value_site(node)] = self.values[node]
        return ordered

    def left_out(self) -> dict[Site, str]:
        """The values that stay in float, in graph order, each with the reason."""
        reasons: dict[Site, str] = {}
        for node in self.graph.nodes:
            for draft in self.nested.get(node, ()):
                reasons |= draft.left_out()
            if node in self.floats:
                reasons[value_site(node)] = self.floats[node]
        return reasons


def is_empty(node: fx.Node) -> bool:
    """Says whether the value of ``node`` has no elements."""
    return any(isinstance(size, int) and size == 0 for size in node.meta["val"].shape)


def agrees(plan: SitePlan, wanted: SitePlan, decision: Decision) -> bool:
    """Says whether a plan has what ``decision``, which makes it ``wanted``, says of it."""
    said = [name for name in ("scheme", "range", "min_fill", "bounds") if name in decision.origins]
    return plan.spec == wanted.spec and all(getattr(plan, name) == getattr(wanted, name) for name in said)


def _path(op: fx.Node) -> str:
    return value_site(op).name.partition(":")[0]
