"""What a step needs a graph to hold, so that it can do something there; the driver of a list leaves out the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from typing import Protocol, TypeVar


class Needing(Protocol):
    """A step of a list that says what it needs.

    ``needs``: what it acts on: a graph that holds none of these stays as it is; empty: it acts on every graph.
    """

    @property
    def needs(self) -> frozenset[object]: ...


Step = TypeVar("Step", bound=Needing)
Found = TypeVar("Found")


def concerned(steps: Iterable[Step], contents: Callable[[], Set[object]]) -> Iterator[Step]:
    """Yields the steps that may act on a graph, in their order.

    Whether a step does is decided when it is its turn, of the graph that the steps before it left.

    >>> from typing import NamedTuple
    >>> class Rewrite(NamedTuple):
    ...     name: str
    ...     needs: frozenset[object] = frozenset()
    >>> rewrites = (Rewrite("loops", frozenset({"Scan", "Loop"})), Rewrite("names"))
    >>> [rewrite.name for rewrite in concerned(rewrites, lambda: {"Conv", "Relu"})]
    ['names']

    Args:
        steps: in the order in which they run.
        contents: what the graph holds now.
    """
    held: Set[object] | None = None
    for step in steps:
        if step.needs:
            held = contents() if held is None else held
            if step.needs.isdisjoint(held):
                continue
        yield step
        held = None  # the step may have changed the graph


def found_where(
    needs: Set[object], contents: Set[object], analysis: Callable[[], Found], otherwise: Found
) -> Found:
    """Returns what ``analysis`` finds in a graph that holds one of ``needs``; for other graphs ``otherwise``.

    >>> found_where({"concat", "stack"}, {"conv2d", "relu"}, lambda: ["cat_1"], [])
    []
    """
    return otherwise if needs.isdisjoint(contents) else analysis()
