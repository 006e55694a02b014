"""The best choices for every budget, exactly: what is chosen costs, alone and in pairs, and loses, alone.

A multiple-choice knapsack whose items are coupled: bit operations of a layer depend on the widths of its weight and of
its input, which other layers read too. Two known means together solve it without a budget being known: keeping only
choices that no other dominates (Nemhauser and Ullmann, Management Science 15, 1969), and eliminating one variable after
the other, each with the costs it has in common with others (bucket elimination: Dechter, Artificial Intelligence 113,
1999).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

POINTS = 4096
"""Most points of a frontier; of more, points whose costs differ by less than a 4096th of the range become one."""

OPEN = -1
"""The pick of a variable that a frontier says nothing of."""

Scope: TypeAlias = tuple[int, ...]
"""Variables in rising order."""


@dataclass(frozen=True, slots=True, eq=False)
class Frontier:
    """Choices, none of which costs as much or more than another and loses as much or more.

    Args:
        costs: [points], rising.
        losses: [points], falling.
        picks: [points, variables], which choice of each variable; -1 for one that was not chosen yet.
    """

    costs: NDArray[np.float64]
    losses: NDArray[np.float64]
    picks: NDArray[np.int8]

    def within(self, budget: float) -> int | None:
        """The point that loses least for ``budget`` at most; ``None`` if no point is as cheap."""
        count = int(np.searchsorted(self.costs, budget, side="right"))
        return count - 1 if count else None


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """A cost that depends on what is chosen for some variables.

    Args:
        variables: which, each once.
        costs: an axis for each of them, as long as its variable has choices.
    """

    variables: tuple[int, ...]
    costs: NDArray[np.float64]


def frontier(losses: Sequence[Sequence[float]], terms: Iterable[Term]) -> Frontier:
    """The choices that lose least for what they cost, for every budget at once.

    >>> both = frontier([[0.5, 0.0], [0.3, 0.0]], [Term((0,), np.array([1.0, 2.0])), Term((1,), np.array([1.0, 3.0]))])
    >>> [(float(cost), float(loss)) for cost, loss in zip(both.costs, both.losses)]
    [(2.0, 0.8), (3.0, 0.3), (5.0, 0.0)]
    >>> both.picks[both.within(4.0)]
    array([1, 0], dtype=int8)

    Args:
        losses: for each variable what each of its choices loses; all losses are summed.
        terms: costs, which are summed.

    Exact as long as no frontier has more than ``POINTS`` points; with more, a solution that is found costs what it
    says, but one that loses a little less may be missed.
    """
    count = len(losses)
    costs, known = [_sorted(term) for term in terms], list[tuple[Scope, Mapping[Scope, Frontier]]]()
    left = set(range(count))
    while left:
        variable = min(left, key=lambda each: (_size(_neighbours(each, costs, known), losses), each))
        left.remove(variable)
        scope = tuple(sorted(_neighbours(variable, costs, known)))
        own = [term for term in costs if variable in term.variables]
        factors = [factor for factor in known if variable in factor[0]]
        table = {}
        for chosen in itertools.product(*(range(len(losses[each])) for each in scope)):
            picked = dict(zip(scope, chosen, strict=True))
            alternatives = []
            for pick, loss in enumerate(losses[variable]):
                picked[variable] = pick
                cost = sum(float(term.costs[tuple(picked[each] for each in term.variables)]) for term in own)
                parts = [found[tuple(picked[each] for each in of)] for of, found in factors]
                alternatives.append(_sum([_point(cost, loss, variable, pick, count), *parts]))
            table[chosen] = _union(alternatives)
        costs = [term for term in costs if variable not in term.variables]
        known = [factor for factor in known if variable not in factor[0]] + [(scope, table)]
    return _sum([_point(0.0, 0.0, None, 0, count), *(found[()] for _, found in known)])


def _sorted(term: Term) -> Term:
    order = np.argsort(term.variables)
    return Term(tuple(term.variables[axis] for axis in order), np.asarray(term.costs, np.float64).transpose(order))


def _neighbours(
    variable: int, costs: Sequence[Term], known: Sequence[tuple[Scope, Mapping[Scope, Frontier]]]
) -> set[int]:
    scopes = [term.variables for term in costs] + [scope for scope, _ in known]
    return {each for scope in scopes if variable in scope for each in scope} - {variable}


def _size(scope: Iterable[int], losses: Sequence[Sequence[float]]) -> int:
    return math.prod(len(losses[each]) for each in scope)


def _point(cost: float, loss: float, variable: int | None, pick: int, count: int) -> Frontier:
    picks = np.full((1, count), OPEN, np.int8)
    if variable is not None:
        picks[0, variable] = pick
    return Frontier(np.array([cost]), np.array([loss]), picks)


def _sum(parts: Sequence[Frontier]) -> Frontier:
    """All combinations of one point of each part, which are of different variables; small parts first."""
    first, *others = sorted(parts, key=lambda each: len(each.costs))
    for other in others:
        costs, losses = ((a[:, None] + b[None, :]).ravel() for a, b in
                         ((first.costs, other.costs), (first.losses, other.losses)))
        kept = _undominated(costs, losses)
        left, right = np.divmod(kept, len(other.costs))
        first = Frontier(costs[kept], losses[kept], np.maximum(first.picks[left], other.picks[right]))
    return first


def _union(parts: Sequence[Frontier]) -> Frontier:
    costs, losses, picks = (np.concatenate([getattr(part, name) for part in parts])
                            for name in ("costs", "losses", "picks"))
    kept = _undominated(costs, losses)
    return Frontier(costs[kept], losses[kept], picks[kept])


def _undominated(costs: NDArray[np.float64], losses: NDArray[np.float64]) -> NDArray[np.intp]:
    """Indices of the points that no other dominates, the cheapest first; the best of each cell if they are too many."""
    order = np.lexsort((losses, costs))
    ordered = losses[order]
    before = np.concatenate([[np.inf], np.minimum.accumulate(ordered)[:-1]])
    kept: NDArray[np.intp] = order[(ordered < before) | (np.arange(len(order)) == 0)]
    if len(kept) > POINTS:
        lowest, highest = costs[kept[0]], costs[kept[-1]]
        cells = np.floor((costs[kept] - lowest) / (highest - lowest) * (POINTS - 1))
        last = np.append(cells[1:] != cells[:-1], True)
        last[0] = True  # the cheapest of all
        kept = kept[last]
    return kept
