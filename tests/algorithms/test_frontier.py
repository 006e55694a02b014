"""The frontier against all combinations, one by one."""

import itertools

import numpy as np
import pytest

from qtk.algorithms import frontier as room
from qtk.algorithms.frontier import OPEN, Term, frontier


def problem(seed: int, variables: int, pairs: int):
    random = np.random.default_rng(seed)
    sizes = random.integers(2, 5, variables)
    losses = [np.sort(random.random(size))[::-1] for size in sizes]
    terms = [Term((each,), np.sort(random.random(sizes[each]))) for each in range(variables)]
    for _ in range(pairs):
        scope = tuple(int(each) for each in random.choice(variables, size=2, replace=False))
        terms.append(Term(scope, random.random(tuple(sizes[each] for each in scope))))
    return losses, terms


def all_combinations(losses, terms):
    for picks in itertools.product(*(range(len(each)) for each in losses)):
        cost = sum(term.costs[tuple(picks[each] for each in term.variables)] for term in terms)
        yield cost, sum(each[pick] for each, pick in zip(losses, picks, strict=True)), picks


@pytest.mark.parametrize("pairs", [0, 3, 9])
@pytest.mark.parametrize("seed", range(6))
def test_no_combination_is_better_at_any_budget(seed, pairs):
    losses, terms = problem(seed, 6, pairs)
    found, combinations = frontier(losses, terms), list(all_combinations(losses, terms))
    budgets = np.quantile([cost for cost, _, _ in combinations], np.linspace(0, 1, 23))
    for budget in budgets + 1e-9:  # sums of another order
        best = min(loss for cost, loss, _ in combinations if cost <= budget)
        index = found.within(budget)
        assert found.losses[index] == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_each_point_costs_and_loses_what_it_says(seed):
    losses, terms = problem(seed, 6, 6)
    found = frontier(losses, terms)
    assert OPEN not in found.picks
    for cost, loss, picks in zip(found.costs, found.losses, found.picks, strict=True):
        assert cost == pytest.approx(sum(term.costs[tuple(picks[each] for each in term.variables)] for term in terms))
        assert loss == pytest.approx(sum(each[pick] for each, pick in zip(losses, picks, strict=True)))


def test_costs_rise_and_losses_fall():
    found = frontier(*problem(0, 8, 4))
    assert (np.diff(found.costs) > 0).all()
    assert (np.diff(found.losses) < 0).all()


def test_too_small_a_budget_has_no_point():
    found = frontier([[1.0, 0.0]], [Term((0,), np.array([2.0, 3.0]))])
    assert found.within(1.99) is None
    assert found.within(2.0) == 0


def test_nothing_to_choose_costs_nothing():
    assert frontier([], []).costs.tolist() == [0.0]


def test_many_points_are_thinned_and_stay_true(monkeypatch):
    losses, terms = problem(1, 9, 0)
    whole = frontier(losses, terms)
    monkeypatch.setattr(room, "POINTS", 64)
    thinned = frontier(losses, terms)
    assert len(thinned.costs) <= 66 < len(whole.costs)
    assert thinned.costs[0] == whole.costs[0]
    assert thinned.losses[-1] == whole.losses[-1]
    for cost, picks in zip(thinned.costs, thinned.picks, strict=True):
        assert cost == pytest.approx(sum(term.costs[tuple(picks[each] for each in term.variables)] for term in terms))
    step = (whole.costs[-1] - whole.costs[0]) / 63
    for cost, loss in zip(whole.costs, whole.losses, strict=True):  # as good within a step for each merge
        assert thinned.losses[thinned.within(cost + 9 * step)] <= loss
