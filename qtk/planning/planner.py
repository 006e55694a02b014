"""(graph, config) → ``QuantPlan``: pure, the graph is only read.

The rules, numbered as the code cites them:

1. A value made by a compute op gets one quantizer, at its producer, for all readers.
2. Model inputs that somebody reads likewise, unless ``io.inputs`` is ``float``.
3. Inside a supergroup, and inside a formula spelled out in small ops, only the last value is quantized.
4. A parameter at a weight port gets the weight setting, its channel axis followed back through reshapes; at a bias
   port the bias setting; at any other port of a compute op it is a constant and gets the activation setting, or stays
   in float where activations take their ranges at run time: there is no such thing for a constant.
5. A merge (concat, stack, where, scatter) and the values it merges share the encoding of its output. A value that is
   also read elsewhere keeps its own quantizer, and the edge into the merge gets the shared one. Not so where ranges
   are taken at run time.
6. The value of an op the table does not know is quantized where a known op reads it.
7. An edge gets a quantizer of its own only where a reader asks for another spec than the producer has.
8. Movement ops, integers, booleans and shapes get nothing.
9. A value that only divides is left in float.
10. A composite (attention, a recurrent net) is planned inside, by the same rules; the values it hands out need nothing
   more then. Its weights and inputs are quantized outside it.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from qtk.capture.composites import composite_called
from qtk.capture.prepared_model import PreparedModel, parameters_outside
from qtk.config.schema import Io, QuantConfig
from qtk.core.plan import QuantPlan, SitePlan
from qtk.core.site import Site
from qtk.core.spec import QuantSpec
from qtk.errors import SpecError
from qtk.graph.flow import Flow, maker
from qtk.graph.graphs import nested_graphs, roots
from qtk.graph.op_row import Role
from qtk.graph.op_table import OP_NAMES, op_name
from qtk.graph.sites import EXCLUDED, Port, edge_site, is_float, label, ports, value_site
from qtk.planning.patterns import PATTERNS, PatternMatch, match_patterns
from qtk.planning.rules import Decision, Rules, to_spec
from qtk.planning.supergroups import match_supergroups

RULE_NAMES = OP_NAMES | {pattern.kind for pattern in PATTERNS}
"""Every op name a config rule may use."""


def plan(
    model: PreparedModel, config: QuantConfig, *, weight_bits: int | None, activation_bits: int | None, scheme: str
) -> QuantPlan:
    """Decides every site of a prepared model.

    Raises: SpecError listing every tensor that its block size does not divide; ConfigError if the config and the
    widths contradict each other.
    """
    rules = Rules(config, weight_bits=weight_bits, activation_bits=activation_bits)
    found = roots(model)
    io = config.io if list(found) == [""] else Io()  # what goes into an island comes from the model itself
    planners = [_Planner(graph.graph, rules, scheme, io) for graph in found.values()]
    for planner in planners:
        planner.decide()
    misfits = [line for planner in planners for line in planner.misfits]
    if misfits:
        raise SpecError(
            "\n  ".join(["block sizes that do not fit:", *misfits])
            + "\ngive these sites another block_size or granularity by a rule, e.g. {match: {path: …}, weight: "
            "{granularity: per_channel}}"
        )
    sites: dict[Site, SitePlan] = {}
    unquantized: dict[Site, str] = {}
    for planner in planners:
        sites |= planner.in_order()
        unquantized |= planner.left_out()
    unquantized |= {Site.parameter(name): reason for name, reason in parameters_outside(model).items()}
    return QuantPlan(sites, unquantized, rules.unmatched())


class _Planner:
    """Plans one graph.

    Args:
        graph: the graph.
        rules: the configuration.
        scheme: where no rule names one.
        io: what happens at the graph's inputs and outputs; ``None``: the graph is the inside of an op, whose inputs are
            quantized outside and whose every value is a site: nothing in it is a formula somebody spelled out.
    """

    def __init__(self, graph: fx.Graph, rules: Rules, scheme: str, io: Io | None) -> None:
        self.graph = graph
        self.rules = rules
        self.scheme = scheme
        self.io = io
        self.flow = Flow(graph)
        self.values: dict[fx.Node, SitePlan] = {}
        self.edges: dict[Site, SitePlan] = {}
        self.floats: dict[fx.Node, str] = {}
        self.inside: dict[fx.Node, list[_Planner]] = {}
        matches = match_patterns(graph) if io is not None else []
        self.formulas = {node: match for match in matches for node in match.nodes}
        self.misfits: list[str] = []

    def decide(self) -> None:
        inner = {
            node: f"inside supergroup {group}"
            for group in match_supergroups(self.graph, self.flow, self.rules.config.supergroups, self.formulas)
            for node in group.nodes[:-1]
        }
        inner |= {
            node: f"inside {formula.kind}, spelled out"
            for node, formula in self.formulas.items() if node != formula.nodes[-1]
        }
        for node in self.graph.nodes:
            self._plan_inside(node)
        for node in self.graph.nodes:
            if is_float(node) and node.op != "get_attr" and self.flow.carried(node) is None:
                self._plan_value(node, inner)
        for node in self.graph.nodes:
            self._plan_operands(node)
        for node in reversed(self.graph.nodes):
            self._share_merge(node)
        for node in self.graph.nodes:
            self._plan_edges(node)

    # Rule 10: composites, before the values around them.

    def _plan_inside(self, node: fx.Node) -> None:
        if label(node, EXCLUDED):
            return
        nested = nested_graphs(node).items()
        parts = {path: _Planner(part.graph, self.rules, self.scheme, None) for path, part in nested}
        for planner in parts.values():
            planner.decide()
            self.misfits += planner.misfits
        for first, second in getattr(composite_called(node), "joined_parts", ()):
            if {first, second} <= parts.keys():
                parts[second].follow(parts[first])
        if parts:
            self.inside[node] = list(parts.values())

    def follow(self, other: _Planner) -> None:
        """The first result of this part is joined with that of ``other``: they share one encoding, if they have one."""
        mine, leading = (part.flow.root(part.graph.output_node().all_input_nodes[0]) for part in (self, other))
        if mine in self.values and leading in other.values and not other.values[leading].spec.dynamic:
            leader = value_site(leading)
            self.values[mine] = replace(other.values[leading], leader=leader, reason=f"joined with {leader}")

    def _made_inside(self, node: fx.Node) -> bool:
        """Whether a composite hands out values that are quantized already, by the last of its parts."""
        if node not in self.inside:
            return False
        last = self.inside[node][-1]
        return all(last.flow.root(value) in last.values for value in last.graph.output_node().all_input_nodes)

    # Rules 1, 2, 3, 6: the value at its producer.

    def _plan_value(self, node: fx.Node, inner: dict[fx.Node, str]) -> None:
        flow, row = self.flow, self.flow.row(node)
        formula = self.formulas.get(node)
        decided = self.rules.decisions(maker(node), flow, kind=formula.kind if formula else None).output
        readers = list(flow.readers(node))
        operands = [port for port in readers if self._takes_data(port)]
        if label(node, EXCLUDED):
            self.floats[node] = "excluded by modules_to_exclude"
        elif _is_empty(node):
            self.floats[node] = "has no elements"
        elif flow.is_static(node):
            self.floats[node] = "computed from parameters"  # rule 4 decides where it is read
        elif node in inner:
            self.floats[node] = inner[node]
        elif self._made_inside(maker(node)):
            pass
        elif node.op == "placeholder":
            if self.io is None:
                pass
            elif self.io.inputs == "float":
                self.floats[node] = "io.inputs is float"
            elif operands:
                self._decide(node, decided, "model input")
            else:
                self.floats[node] = self._read_by_unknown(readers) or "no op computes with it"
        elif row is None or flow.is_constant(node):
            if operands:
                source = "constant" if row else f"op {op_name(maker(node))} is not in the op table"
                self._decide(node, decided, f"{source}; read by {operands[0].user.name}")
            elif row is None:
                self.floats[node] = f"op {op_name(maker(node))} is not in the op table"
        elif readers and all(self._divides(port) for port in readers):
            self.floats[node] = "only divides: a value that rounds to 0 would make the result infinite"
        elif self.io is not None and self.io.outputs == "float" and all(port.user.op == "output" for port in readers):
            self.floats[node] = "io.outputs is float"
        else:
            self._decide(node, decided, formula.kind if formula else row.kind)

    def _decide(self, node: fx.Node, decided: Decision, why: str, *, static: bool = False) -> None:
        if not decided.enabled:
            self.floats[node] = f"float by {decided.reason}"
            return
        spec = to_spec(decided.setting, None, node.meta["val"].ndim)
        self.values[node] = self._site_plan(spec, decided, why, static=static)

    def _site_plan(self, spec: QuantSpec, decided: Decision, why: str, *, static: bool) -> SitePlan:
        known = None if static else decided.setting.range
        return SitePlan(
            spec,
            decided.setting.scheme or self.scheme,
            static=static,
            range=None if known is None else (float(known[0]), float(known[1])),
            bounds=decided.setting.bounds,
            reason=f"{why}; {decided.reason}",
        )

    # Rule 4: parameters.

    def _plan_operands(self, node: fx.Node) -> None:
        row = self.flow.row(node)
        if row is None or row.role is not Role.COMPUTE or self.flow.is_static(node):
            return  # what is computed from parameters alone is a parameter to its reader
        if node in self.formulas:
            self._plan_formula(node, self.formulas[node])
            return
        decisions = self.rules.decisions(node, self.flow)
        for port in self.flow.weight_ports(node):
            axes = row.weight_axes(node, port.value) if row.weight_axes else None
            self._plan_parameter(port, decisions.weight, axes, f"weight of {row.kind}")
        for port in self.flow.bias_ports(node):
            if self.flow.is_static(port.value):
                self._plan_parameter(port, decisions.bias, None, f"bias of {row.kind}")
        for port in self.flow.data_ports(node):
            if self.flow.is_static(port.value) and not self._divides(port):
                self._plan_constant(port, f"constant operand of {row.kind}")

    def _plan_constant(self, port: Port, why: str) -> None:
        node = self.flow.root(port.value)
        if not self.rules.activation.setting.is_dynamic:
            self._plan_parameter(port, self.rules.activation, None, why)
        elif node not in self.values:
            self.floats.setdefault(node, "constant; ranges are taken at run time")

    def _plan_formula(self, node: fx.Node, formula: PatternMatch) -> None:
        """The parameters of a formula are treated as those of the op it spells out; its numbers are left alone."""
        decisions = self.rules.decisions(node, self.flow, kind=formula.kind)
        parameters = ((formula.weight, decisions.weight, "weight"), (formula.bias, decisions.bias, "bias"))
        for port in ports(node):
            for parameter, decided, role in parameters:
                if parameter is not None and self.flow.root(port.value) is self.flow.root(parameter):
                    self._plan_parameter(port, decided, None, f"{role} of {formula.kind}")

    def _plan_parameter(self, port: Port, decided: Decision, axes: tuple[int, int] | None, why: str) -> None:
        node = self.flow.root(port.value)
        moved = None if axes is None else tuple(self.flow.axis_at_root(port.value, axis) for axis in axes)
        if node.op != "get_attr" or (moved is not None and None in moved):
            node, moved = port.value, axes  # quantize what the op reads: the axis has no place in the parameter
        if not decided.enabled:
            self.floats.setdefault(node, f"float by {decided.reason}")
            return
        shape = tuple(node.meta["val"].shape)
        try:
            spec = to_spec(decided.setting, moved, len(shape))  # type: ignore[arg-type]
            spec.granularity.qparam_shape(shape)
        except SpecError as error:
            self.misfits.append(f"{value_site(node)}: {error}")
            return
        wanted = self._site_plan(spec, decided, why, static=True)
        self.floats.pop(node, None)
        present = self.values.setdefault(node, wanted)
        if present.spec != spec and not self._same_numbers(port, present.spec, spec):
            self.edges[edge_site(port)] = wanted

    def _same_numbers(self, port: Port, present: QuantSpec, wanted: QuantSpec) -> bool:
        """A constant operand is content with whatever encoding its parameter already has."""
        return port.arg not in (row.weights if (row := self.flow.row(port.user)) else ())

    # Rule 5: merges, the last first, so that chains of merges end at one leader.

    def _share_merge(self, node: fx.Node) -> None:
        row = self.flow.row(node)
        if row is None or row.role is not Role.MERGE or self.flow.carried(node) is not None:
            return
        if node not in self.values or self.values[node].spec.dynamic:
            return  # each tensor has a range of its own
        leader, shared = value_site(node), self.values[node]
        if shared.leader is not None:
            leader = shared.leader
        for port in self.flow.data_ports(node):
            source = self.flow.root(port.value)
            if _is_empty(port.value):
                continue
            follower = replace(shared, leader=leader, reason=f"merged by {value_site(node)}")
            alone = all(reader.user is node for reader in self.flow.readers(source))
            own = self.values.get(source)
            if own is not None and own.leader == leader:
                continue  # Concat(x, x): shared already
            if self.flow.is_static(source) and own is None:
                target = source if alone else None
            elif own is None:
                continue  # float by a rule or inside an unquantized region: nothing to share
            else:
                target = source if alone and own.leader is None and own.range is None else None
            if target is not None:
                self.values[target] = replace(follower, static=False)
            else:
                self.edges[edge_site(port)] = follower

    # Rule 7: readers that ask for another spec.

    def _plan_edges(self, node: fx.Node) -> None:
        row = self.flow.row(node)
        if row is None or row.role is not Role.COMPUTE or node in self.formulas:
            return
        decided = self.rules.decisions(node, self.flow).input
        if not decided.enabled or decided.reason == self.rules.activation.reason:
            return
        for port in self.flow.data_ports(node):
            if decided.setting.is_dynamic and self.flow.is_static(port.value):
                continue  # rule 4
            present = self.values.get(self.flow.root(port.value))
            spec = to_spec(decided.setting, None, port.value.meta["val"].ndim)
            if present is None or present.spec != spec:
                self.edges[edge_site(port)] = self._site_plan(spec, decided, f"input of {row.kind}", static=False)

    def _divides(self, port: Port) -> bool:
        row = self.flow.row(port.user)
        return row is not None and port.arg in row.divisors

    def _takes_data(self, port: Port) -> bool:
        row = self.flow.row(port.user)
        if row is None or row.role not in (Role.COMPUTE, Role.MERGE):
            return False
        return any(other.index == port.index for other in self.flow.data_ports(port.user))

    # The result, in graph order, parameters beside the op that reads them first.

    def in_order(self) -> dict[Site, SitePlan]:
        ordered: dict[Site, SitePlan] = {}
        for node in self.graph.nodes:
            if node.op == "get_attr":
                continue
            for port in ports(node):
                if port.value.op == "get_attr" and port.value in self.values:
                    ordered.setdefault(value_site(port.value), self.values[port.value])
                if (site := edge_site(port)) in self.edges:
                    ordered[site] = self.edges[site]
            for planner in self.inside.get(node, ()):
                ordered |= planner.in_order()
            if node in self.values:
                ordered[value_site(node)] = self.values[node]
        return ordered

    def _read_by_unknown(self, readers: list[Port]) -> str | None:
        """The reason of a value that ops without a row read."""
        names = {op_name(p.user) for p in readers if p.user.op != "output" and self.flow.row(p.user) is None}
        return f"read by {', '.join(sorted(names))}, not in the op table" if names else None

    def left_out(self) -> dict[Site, str]:
        for node in self.graph.nodes:
            if node.op == "get_attr" and is_float(node) and node not in self.values:
                reason = self._read_by_unknown(list(self.flow.readers(node)))
                if reason is not None:
                    self.floats.setdefault(node, reason)
        found: dict[Site, str] = {}
        for node in self.graph.nodes:
            for planner in self.inside.get(node, ()):
                found |= planner.left_out()
            if node in self.floats:
                found[value_site(node)] = self.floats[node]
        return found


def _is_empty(node: fx.Node) -> bool:
    return any(isinstance(size, int) and size == 0 for size in node.meta["val"].shape)
