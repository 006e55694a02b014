"""Cuts a captured graph at modules: each call of a block is a graph of its own, and an outer graph calls the blocks."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import SymInt, Tensor, fx, nn

from qtk.errors import CaptureError
from qtk.graph.captured_graph import LENT, CapturedGraph
from qtk.graph.insert import quantizer_called
from qtk.graph.sites import SITE, is_float, label, prefixes, value_site
from qtk.operators.targets import ModuleCall, called_module, module_calls
from qtk.torch_private import empty_like, schema_of

ROOT = "qtk_root"
"""The attribute by which the graph of a block reaches modules outside it, quantizers above all: the whole graph."""

WRITTEN = "qtk_written"
"""Key of the ``meta`` of a block's input: whether an op writes to the tensor, which is a buffer then."""


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of a block; ``key`` tells the calls of one block apart."""

    block: nn.Module
    key: str


_Unit: TypeAlias = _Call | fx.Node


def cut(
    graph: CapturedGraph,
    blocks: Mapping[nn.Module, str],
    codes: MutableMapping[nn.Module, list[CapturedGraph]],
    call_block: Callable[..., object],
) -> fx.Graph:
    """Cuts ``graph`` at the modules ``blocks``.

    A quantizer goes with the op that makes its value, one on an edge with the op that reads it, one of a parameter with
    the parameter. A parameter is read in the call of a block if the block holds it and nothing else reads it; in each
    call, if there are several. Whatever else enters a block is an argument of it: float activations first, in the
    order in which the block reads them. A block returns the float tensor it makes last, in front of others that leave
    it.

    Args:
        graph: the graph; not changed.
        blocks: module → its path; none inside another.
        codes: module → graphs of its calls; one is added for each call in ``graph``. They read the members of the
            module when they run.
        call_block: called by the outer graph with the module at the path, the index of the call's graph in ``codes``,
            and the arguments.

    Returns: the outer graph, with the inputs and outputs of ``graph``.

    Raises: CaptureError if a value leaves a block and what is computed from it enters the same call again.
    """
    plan = _Plan(graph, blocks)
    order = plan.ordered()
    outer = empty_like(graph.graph)
    values: dict[fx.Node, fx.Node] = {}
    for unit in order:
        if isinstance(unit, fx.Node):
            values[unit] = outer.node_copy(unit, values.__getitem__)
            continue
        sizes, outputs = plan.sizes(unit), plan.outputs(unit)
        if not outputs:
            continue
        inputs = [node for node in plan.inputs(unit) if node not in sizes]
        code = CapturedGraph(unit.block, plan.inner(unit, inputs, sizes, outputs))
        code.__dict__[ROOT] = graph
        code.meta[LENT] = (ROOT,)
        block = outer.create_node("get_attr", blocks[unit.block])
        result = outer.call_function(call_block, (block, len(codes[unit.block]), *(values[node] for node in inputs)))
        codes[unit.block].append(code)
        if len(outputs) == 1:
            values[outputs[0]] = result
        else:
            values |= {node: outer.call_function(operator.getitem, (result, i)) for i, node in enumerate(outputs)}
        for node in outputs:
            values[node].meta["val"] = node.meta.get("val")
    return outer


class _Plan:
    """Which nodes of a graph belong to which call of a block."""

    def __init__(self, graph: CapturedGraph, blocks: Mapping[nn.Module, str]) -> None:
        self.nodes = list(graph.graph.nodes)
        self.graph, self.blocks = graph, blocks
        self.within = {block: {module: path for path, module in block.named_modules()} for block in blocks}
        modules = dict(graph.named_modules(remove_duplicate=False))
        self.homes: dict[fx.Node, _Call] = {}
        self.pathless: set[fx.Node] = set()
        for node in self.nodes:
            if node.op not in ("call_function", "call_module") or quantizer_called(node) is not None:
                continue
            around = module_calls(node)
            if not around:
                self.pathless.add(node)
            elif (call := _outermost_call(around, modules, blocks)) is not None:
                self.homes[node] = call
        self._place_quantizers_and_parameters()

    def ordered(self) -> list[_Unit]:
        """The calls, and the nodes outside them, in an order in which they can run: the graph's order, if possible.

        Raises: CaptureError if there is none.
        """
        while True:
            done, loop = self._sort()
            if loop is None:
                return done
            between = [unit for unit in loop if isinstance(unit, fx.Node)]
            if len(between) < len(loop) - 1 or not self.pathless.issuperset(between):
                raise CaptureError(self._not_convex(loop))
            home = next(unit for unit in loop if isinstance(unit, _Call))
            self.homes |= dict.fromkeys(between, home)  # sizes of values inside the block
            self._place_quantizers_and_parameters()

    def inputs(self, call: _Call) -> list[fx.Node]:
        """The values that enter a call, in the order of its arguments."""
        members = set(self.members[call])
        entering = dict.fromkeys(
            value for node in self.members[call] for value in node.all_input_nodes if value not in members
        )
        return sorted(entering, key=self._argument_rank)

    def sizes(self, call: _Call) -> dict[fx.Node, tuple[fx.Node, int]]:
        """The sizes that enter a call and equal a length of a tensor that enters it: the tensor and the axis."""
        entering = self.inputs(call)
        known = {
            _expression(size): (node, axis) for node in reversed(entering)
            if isinstance(value := node.meta.get("val"), Tensor) for axis, size in enumerate(value.shape)
        }
        sizes = {node: _expression(node.meta.get("val")) for node in entering}
        return {node: known[size] for node, size in sizes.items() if size is not None and size in known}

    def outputs(self, call: _Call) -> list[fx.Node]:
        """The values that leave a call, in the order in which it returns them."""
        members = set(self.members[call])
        leaving = [node for node in self.members[call] if node not in self.copies and set(node.users) - members]
        main = next((node for node in reversed(leaving) if is_float(node)), None)
        return leaving if main is None else [main, *(node for node in leaving if node is not main)]

    def inner(
        self, call: _Call, inputs: Iterable[fx.Node], sizes: Mapping[fx.Node, tuple[fx.Node, int]],
        outputs: list[fx.Node],
    ) -> fx.Graph:
        """The graph of one call, to run with the members of the block."""
        inner = fx.Graph()
        values: dict[fx.Node, fx.Node] = {}
        for node in inputs:
            values[node] = inner.placeholder(node.name)
            values[node].meta = {**node.meta, WRITTEN: any(_writes(user) for user in node.users)}
        for node, (tensor, axis) in sizes.items():
            values[node] = inner.call_function(torch.ops.aten.sym_size.int, (values[tensor], axis))
        for node in self.members[call]:
            copied = values[node] = inner.node_copy(node, values.__getitem__)
            if node.op in ("get_attr", "call_module"):
                copied.target = self._target(node, call.block)
        results = tuple(values[node] for node in outputs)
        inner.output(results if len(results) > 1 else results[0])
        return inner

    def _target(self, node: fx.Node, block: nn.Module) -> str:
        owner, leaf = (called_module(node), None) if node.op == "call_module" else self._owner(node)
        assert owner is not None
        path = self.within[block].get(owner)
        if path is None:
            return f"{ROOT}.{node.target}"
        return path if leaf is None else f"{path}.{leaf}" if path else leaf

    def _owner(self, node: fx.Node) -> tuple[nn.Module, str]:
        """The module that holds what a ``get_attr`` node reads, and its name there."""
        owner, _, leaf = str(node.target).rpartition(".")
        return self.graph.get_submodule(owner), leaf

    def _place_quantizers_and_parameters(self) -> None:
        self.copies: dict[fx.Node, set[_Call]] = {}
        for node in self.nodes:
            if quantizer_called(node) is not None:
                beside = next(iter(node.users), None) if _is_on_edge(node) else node.all_input_nodes[0]
                if beside in self.homes:
                    self.homes[node] = self.homes[beside]
        for node in self.graph.graph.find_nodes(op="get_attr"):
            read = [node, *(u for u in node.users if quantizer_called(u) is not None and not _is_on_edge(u))]
            calls = {self.homes.get(user) for value in read for user in value.users if user not in read}
            homes = {call for call in calls if call is not None}
            if homes and len(homes) == len(calls) and all(
                self._owner(node)[0] in self.within[call.block] for call in homes
            ):
                self.copies |= dict.fromkeys(read, homes)
        self.members: dict[_Call, list[fx.Node]] = {}
        self.static: set[fx.Node] = set()
        for node in self.nodes:
            for call in self.copies.get(node) or filter(None, (self.homes.get(node),)):
                self.members.setdefault(call, []).append(node)
            sources = node.all_input_nodes
            if node.op == "get_attr" or (sources and self.static.issuperset(sources)):
                self.static.add(node)

    def _argument_rank(self, node: fx.Node) -> int:
        if node in self.static:
            return 3
        return 0 if is_float(node) else 1 if isinstance(node.meta.get("val"), Tensor) else 2

    def _sort(self) -> tuple[list[_Unit], list[_Unit] | None]:
        """Units in order, and a loop among the units outside the order; ``None`` without one."""
        position: dict[_Unit, int] = {}
        for index, node in enumerate(self.nodes):
            if node not in self.copies:
                position.setdefault(self.homes.get(node, node), index)
        sources: dict[_Unit, set[_Unit]] = {
            unit: {self.homes.get(value, value)
                   for value in (self.inputs(unit) if isinstance(unit, _Call) else unit.all_input_nodes)}
            for unit in position
        }
        readers: dict[_Unit, list[_Unit]] = {unit: [] for unit in position}
        for unit, needed in sources.items():
            for source in needed:
                readers[source].append(unit)
        units = {index: unit for unit, index in position.items()}
        missing = {unit: len(needed) for unit, needed in sources.items()}
        ready = [position[unit] for unit, count in missing.items() if not count]
        heapq.heapify(ready)
        done: list[_Unit] = []
        while ready:
            unit = units[heapq.heappop(ready)]
            done.append(unit)
            for reader in readers[unit]:
                missing[reader] -= 1
                if not missing[reader]:
                    heapq.heappush(ready, position[reader])
        waiting = set(position) - set(done)
        if not waiting:
            return done, None
        path: list[_Unit] = [min(waiting, key=position.__getitem__)]
        while (source := min(sources[path[-1]] & waiting, key=position.__getitem__)) not in path:
            path.append(source)
        return done, path[path.index(source) :][::-1]  # from sources to readers

    def _not_convex(self, loop: list[_Unit]) -> str:
        start = next(index for index, unit in enumerate(loop) if isinstance(unit, _Call))
        call, *between = [*loop[start:], *loop[:start]]
        assert isinstance(call, _Call)
        first, last = between[0], between[-1]
        left = next(value for value in self._inputs_of(first) if self.homes.get(value) == call)
        back = next(value for value in self.inputs(call) if self.homes.get(value, value) == last)
        reader = next(node for node in self.members[call] if back in node.all_input_nodes)
        made = dict.fromkeys(self.blocks[u.block] if isinstance(u, _Call) else _name(u) for u in between)
        names = ", ".join(made)
        return (
            f"the cut at {self.blocks[call.block]!r} is not convex: {_name(left)} leaves it, and what {names} makes of "
            f"it enters it again, at {_name(reader)}; cut at a module that is called once for all of it, or at the "
            "modules inside"
        )

    def _inputs_of(self, unit: _Unit) -> list[fx.Node]:
        return self.inputs(unit) if isinstance(unit, _Call) else unit.all_input_nodes


def _outermost_call(
    around: Sequence[ModuleCall], modules: Mapping[str, nn.Module], blocks: Mapping[nn.Module, str]
) -> _Call | None:
    keys = {each.path: each.key for each in around}
    for path in keys:
        for outer in prefixes(path):
            module = modules.get(outer)
            if module is not None and module in blocks:
                return _Call(module, keys.get(outer, outer))
    return None


def _writes(node: fx.Node) -> bool:
    schema = schema_of(node.target)
    return schema is not None and schema.is_mutable


def _is_on_edge(node: fx.Node) -> bool:
    return (label(node, SITE) or "").rpartition(":")[2].startswith("in[")


def _name(node: fx.Node) -> str:
    return label(node, SITE) or value_site(node).name


def _expression(size: object) -> object | None:
    """Returns what a size is computed from; ``None`` if it is a number, or no size."""
    return size.node.expr if isinstance(size, SymInt) else None
