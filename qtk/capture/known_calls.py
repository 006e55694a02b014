"""Calls that a graph is known to serve: their nesting was checked once, and later calls have sizes compared alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from qtk.calls.inputs import is_free
from qtk.calls.served_sizes import SIZES, ServedSizes
from qtk.calls.signature import is_plain
from qtk.errors import CaptureError
from qtk.graph.captured_graph import CapturedGraph
from qtk.torch_private import pytree

MOST = 8
"""Structures that are kept."""


@dataclass(frozen=True, slots=True, eq=False)
class KnownCall:
    """The structure of a call that was checked, and what the leaves of others must be for its graph to serve them.

    Args:
        structure: of its arguments.
        graph: serves it.
        revision: of the graph when the call was checked.
        sizes: which the graph served then; ``None``: all that its placeholders show.
        order: the number of the leaf that each placeholder takes.
        names: of the placeholders.
        captured: of each placeholder the kind of tensor, or the constant that is written into the graph.
        others: the numbers of leaves that no placeholder takes, defaults that were passed, each with its value.
        before: ``captured`` and ``sizes`` of graphs that take calls of this kind first, because they serve fewer sizes.
    """

    structure: pytree.TreeSpec
    graph: CapturedGraph
    revision: int
    sizes: ServedSizes | None
    order: tuple[int, ...]
    names: tuple[str, ...]
    captured: tuple[object, ...]
    others: tuple[tuple[int, object], ...]
    before: tuple[tuple[tuple[object, ...], ServedSizes], ...]

    def leaves(self, structure: pytree.TreeSpec, given: Sequence[object]) -> list[object] | None:
        """The leaves of a call in the order of the placeholders; ``None`` if another graph may be for it."""
        graph, sizes = self.graph, self.sizes
        if graph.revision != self.revision or graph.meta.get(SIZES) is not sizes or self.structure != structure:
            return None
        leaves = [given[index] for index in self.order]
        if not all(map(fits, leaves, self.captured)) or not all(fits(given[i], each) for i, each in self.others):
            return None
        if any(all(map(fits, leaves, captured)) and self._is_served(each, leaves) for captured, each in self.before):
            return None
        return leaves if sizes is None or self._is_served(sizes, leaves) else None

    def _is_served(self, sizes: ServedSizes, leaves: Sequence[object]) -> bool:
        """Says whether a graph serves the sizes, and has the values, that leaves of its kinds have."""
        if sizes.limits or sizes.names or sizes.values:
            try:
                sizes.check_call(dict(zip(self.names, leaves, strict=True)))
            except CaptureError:
                return False
        return True


class KnownCalls:
    """The last kinds of calls of a model that were checked. A copy or pickle of it is empty."""

    def __init__(self) -> None:
        self._calls: list[KnownCall] = []

    def find(self, structure: pytree.TreeSpec, given: Sequence[object]) -> tuple[CapturedGraph, list[object]] | None:
        """The graph that serves a call and the leaves in the order of its placeholders; ``None`` if it is not known."""
        for call in self._calls:
            leaves = call.leaves(structure, given)
            if leaves is not None:
                return call.graph, leaves
        return None

    def add(
        self, graph: CapturedGraph, structure: pytree.TreeSpec, given: Sequence[object], ordered: Sequence[object],
        before: Sequence[tuple[Mapping[str, object], ServedSizes]] = (),
    ) -> None:
        """Keeps a call that was checked, if others of its structure need nothing but their leaves compared.

        Args:
            graph: serves the call.
            structure: of the arguments of the call.
            given: their leaves.
            ordered: the leaves in the order of the placeholders.
            before: of each graph that takes calls of this kind first, placeholder → kind of tensor, and its sizes.
        """
        places = {id(leaf): index for index, leaf in enumerate(given)}
        tensors = [id(leaf) for leaf in given if isinstance(leaf, Tensor)]
        nodes = graph.graph.find_nodes(op="placeholder")
        is_clear = all("val" in node.meta for node in nodes) and len({*tensors}) == len(tensors)
        if is_clear and len(ordered) == len(nodes) and all(id(leaf) in places for leaf in ordered):
            order = tuple(places[id(leaf)] for leaf in ordered)
            others = tuple((index, leaf) for index, leaf in enumerate(given) if index not in order)
            if not all(is_plain(leaf) for _, leaf in others) or not all(
                    isinstance(leaf, Tensor) or is_plain(leaf) for leaf in ordered):
                return
            names = tuple(str(node.target) for node in nodes)
            own = {name: captured_kind(node) for name, node in zip(names, nodes, strict=True)}
            first = tuple((tuple(captured.get(name, kind) for name, kind in own.items()), sizes)
                          for captured, sizes in before)
            call = KnownCall(structure, graph, graph.revision, graph.meta.get(SIZES), order, names, tuple(own.values()),
                             others, first)
            self._calls = [call, *self._calls[:MOST - 1]]

    def __reduce__(self) -> tuple[type[KnownCalls], tuple[()]]:
        return KnownCalls, ()


def captured_kind(node: fx.Node) -> object:
    """Of a placeholder the kind of tensor, or the constant that is written into the graph."""
    value = node.meta["val"]
    if not isinstance(value, Tensor):
        return value
    fixed = tuple((axis, int(size)) for axis, size in enumerate(value.shape) if not is_free(size))
    return _TensorKind(value.ndim, fixed, value.is_floating_point(), value.is_complex())


@dataclass(frozen=True, slots=True)
class _TensorKind:
    ndim: int
    fixed: tuple[tuple[int, int], ...]
    is_float: bool
    is_complex: bool


def fixed_sizes(captured: Mapping[str, object]) -> tuple[int, int]:
    """The number of axes, of all placeholders, that a graph serves at length 1 alone, and at any one length."""
    sizes = [size for kind in captured.values() if isinstance(kind, _TensorKind) for _, size in kind.fixed]
    return sizes.count(1), len(sizes)


def fits(leaf: object, captured: object) -> bool:
    """Says whether a value is of the kind that a placeholder was captured for."""
    if not isinstance(captured, _TensorKind):
        return is_plain(leaf) and leaf == captured
    return isinstance(leaf, Tensor) and leaf.ndim == captured.ndim and (
        leaf.is_floating_point() == captured.is_float and leaf.is_complex() == captured.is_complex
        and all(leaf.shape[axis] == size for axis, size in captured.fixed))
