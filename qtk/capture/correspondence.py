"""Which ops of two graphs of one module are the same ops, so that they are the same sites."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any, TypeAlias

import torch
from torch import fx

from qtk.calls.inputs import is_free
from qtk.graph.sites import OWNER, label
from qtk.nn.scan import Scan
from qtk.operators.lookup import row_of
from qtk.operators.op_row import Role
from qtk.operators.targets import called_module, path_of
from qtk.torch_private import pytree

Pairs: TypeAlias = dict[fx.Node, fx.Node]
"""Op of one graph → the same op of another."""


def corresponding(main: fx.Graph, other: fx.Graph) -> Pairs:
    """Op of ``other`` → the op of ``main`` that the same line of code calls on the same values.

    Two ops correspond if the same module calls the same function, with the same constants, on values that correspond;
    an op that one graph has alone, such as the addition of a mask, stands for the values that it is computed from.

    Args:
        main: a graph of a module.
        other: another graph of the module, for calls with other inputs; inputs and parameters correspond by name.
    """
    return _Matching(main).of(other)


class _Matching:
    def __init__(self, main: fx.Graph) -> None:
        self._named = {_name(node): node for node in main.nodes if node.op in ("placeholder", "get_attr")}
        self._ops: dict[object, list[fx.Node]] = defaultdict(list)
        for node in main.nodes:
            self._ops[_function(node)].append(node)
        self._pairs: Pairs = {}
        self._origins: dict[fx.Node, frozenset[fx.Node]] = {}
        self._taken: set[fx.Node] = set()

    def of(self, other: fx.Graph) -> Pairs:
        for node in other.nodes:
            if node.op in ("placeholder", "get_attr"):
                same = self._named.get(_name(node))
            elif node.op == "output":
                continue
            else:
                same = self._best(node)
            if same is not None:
                self._pairs[node] = same
                self._taken.add(same)
                self._origins[node] = frozenset((same,))
            else:
                self._origins[node] = frozenset().union(*(self._origins[each] for each in node.all_input_nodes))
        return self._pairs

    def _best(self, node: fx.Node) -> fx.Node | None:
        """The op of the main graph with the most equal arguments; ``None`` if none corresponds."""
        best, most = None, -1
        for candidate in self._ops[_function(node)]:
            equal = None if candidate in self._taken else self._equal_arguments(node, candidate)
            if equal is not None and equal > most:
                best, most = candidate, equal
        return self._same_scan(node) if best is None else best

    def _same_scan(self, node: fx.Node) -> fx.Node | None:
        """The only scan of the main graph in the same module, if its values are as large and the same ops read them.

        A module may compute a scan of one step by other code than a scan of several.
        """
        scans = self._ops[_function(node)] if isinstance(called_module(node), Scan) else []
        return next((scan for scan in scans if len(scans) == 1 and scan not in self._taken
                     and _known_sizes(scan) == _known_sizes(node) and _readers(scan) == _readers(node)), None)

    def _equal_arguments(self, node: fx.Node, candidate: fx.Node) -> int | None:
        """Says how many arguments are the same values; ``None`` if one does not correspond."""
        arguments, structure = pytree.tree_flatten((node.args, node.kwargs))
        others, other_structure = pytree.tree_flatten((candidate.args, candidate.kwargs))
        if called_module(node) is None and structure != other_structure:
            return None
        equal = 0
        for mine, its in zip(arguments, others, strict=False):  # a composite may also take a mask
            if isinstance(mine, fx.Node) and isinstance(its, fx.Node) and _is_value(mine) and _is_value(its):
                its = self._named.get(_name(its), its)
                if self._pairs.get(mine) is its:
                    equal += 1
                elif self._origins[mine].isdisjoint(self._sources(its)):
                    return None
            elif not _is_size(mine) and not _is_size(its) and not _is_module(mine) and mine != its:
                return None
        return equal

    def _sources(self, node: fx.Node) -> set[fx.Node]:
        """``node``, and what it is computed from by ops of the main graph that correspond to none so far."""
        sources: set[fx.Node] = set()
        pending = [node]
        while pending:
            each = pending.pop()
            each = self._named.get(_name(each), each)
            if each not in sources:
                sources.add(each)
                pending += () if each in self._taken else each.all_input_nodes
        return sources


def _name(node: fx.Node) -> tuple[str, str]:
    return node.op, path_of(node.target)


def _function(node: fx.Node) -> object:
    """The function that a node calls, and the module whose code calls it."""
    module = called_module(node)
    return node.target if module is None else type(module).__name__, re.sub(r"@\d+", "", label(node, OWNER) or "")


def _known_sizes(node: fx.Node) -> list[list[int]]:
    """The sizes of each value that an op makes, but lengths that vary and 1."""
    values = pytree.tree_leaves(node.meta.get("val"))
    return [[int(size) for size in value.shape if not is_free(size) and int(size) != 1] for value in values]


def _readers(node: fx.Node) -> set[object]:
    """The functions that read the values of an op, whatever moves these in between."""
    readers: set[object] = set()
    pending = [*node.users]
    while pending:
        reader = pending.pop()
        row = row_of(reader)
        if row is not None and row.role is Role.MOVEMENT:
            pending += reader.users
        else:
            readers.add(_function(reader))
    return readers


def _is_value(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (torch.Tensor, list, tuple))


def _is_size(argument: Any) -> bool:
    """Says whether an argument is a number computed from sizes, for which another graph may hold a constant."""
    return isinstance(argument, fx.Node) and not _is_value(argument) and not _is_module(argument)


def _is_module(argument: Any) -> bool:
    return isinstance(argument, fx.Node) and argument.op == "get_attr" and "val" not in argument.meta
