"""The order of trials follows from the choices that earlier trials kept."""

from dataclasses import replace
from types import MappingProxyType

import pytest

from qtk.auto.choices import Choices
from qtk.auto.ranking import Ranking
from qtk.auto.trial_order import CHAINS, DYNAMIC, LEARNED, SAME, TRIED_SCHEMES, TRIED_TRANSFORMS, trial_order

PLAIN = Choices("min_max")


def by_sites(choices):
    """A price that rises with precise sites."""
    return 1.0 + len(choices.precise)


def run(keeps, sites=(), first=PLAIN, price=by_sites, alone=MappingProxyType({}), **options):
    """Every step of a run that keeps the choices of which ``keeps`` is true."""
    kept, steps = [first], []
    for step, choices in trial_order(lambda: kept[-1], lambda: Ranking(tuple(sites), alone), price, **options):
        steps.append((step, choices))
        if keeps(choices):
            kept.append(choices)
    return steps


def test_without_a_gain_every_trial_changes_one_setting_of_the_first():
    trials = [choices for _, choices in run(lambda choices: False)]
    assert trials == [
        *(Choices(scheme) for scheme in TRIED_SCHEMES), *(Choices("min_max", (name,)) for name in TRIED_TRANSFORMS),
        *(Choices("min_max", layerwise=chain) for chain in CHAINS),
    ]


def test_later_trials_build_on_what_was_kept():
    last = run(lambda choices: True, sites=["a", "b"])[-1][1]
    assert last == Choices(TRIED_SCHEMES[-1], TRIED_TRANSFORMS, CHAINS[-1], ("a",))


def test_blocks_are_learned_last_before_sites_are_precise_where_all_bits_are_few():
    steps = [choices for _, choices in run(lambda choices: False, sites=["a"], few_bits=True)]
    assert steps[-2:] == [Choices("min_max", layerwise=LEARNED), Choices("min_max", precise=("a",))]


@pytest.mark.parametrize("scheme", ["min_max", *TRIED_SCHEMES])
def test_a_scheme_is_not_tried_twice_in_a_row(scheme):
    steps = run(lambda choices: choices.transforms == TRIED_TRANSFORMS[:1] and choices.scheme == scheme,
                first=Choices(scheme))
    again = [choices.scheme for step, choices in steps if step.endswith(", after that")]
    assert again == [name for name in TRIED_SCHEMES if name != scheme]
    assert [choices.scheme for _, choices in steps[:len(again)]] == again
    assert all(choices.transforms == TRIED_TRANSFORMS[:1] for step, choices in steps if step.endswith(", after that"))


def test_sites_are_ranked_only_when_nothing_cheaper_is_left():
    ranked, names = [], iter(trial_order(lambda: PLAIN, lambda: ranked.append(1) or Ranking(("a",), {}), by_sites))
    for step, _ in names:
        assert bool(ranked) == (step == "the worst site precise")
    assert ranked


def test_what_is_kept_counts_from_the_next_trial_on():
    seen = run(lambda choices: choices == Choices("mse") or choices.layerwise == CHAINS[0])
    assert [choices for step, choices in seen if step == TRIED_TRANSFORMS[0]] == [Choices("mse", TRIED_TRANSFORMS[:1])]
    chains = [choices for _, choices in seen if choices.layerwise]
    assert chains == [replace(Choices("mse"), layerwise=chain) for chain in CHAINS]  # which replace each other


@pytest.mark.parametrize(("dynamic_price", "place"), [(0.5, 0), (1.0, 0), (1.09, 0), (1.5, -3), (2.5, -2), (4.0, -1)])
def test_dynamic_quantization_has_its_place_by_what_it_takes_at_run_time(dynamic_price, place):
    def price(choices):
        return dynamic_price if choices.dynamic else {0: 1.0, 1: 2.0, 2: 3.0}[len(choices.precise)]

    steps = [step for step, _ in run(lambda choices: False, "abcd", price=price, dynamic=True)]
    assert steps.count(DYNAMIC) == 1
    assert steps.index(DYNAMIC) == place % len(steps)


def test_settings_that_differ_at_run_time_come_cheapest_first():
    prices = {0: 1.0, 1: 3.0, 2: 1.5, 4: 2.0}  # two sites next to each other need no conversion between them
    tried = [len(choices.precise) for _, choices in
             run(lambda choices: False, "abcdefgh", price=lambda choices: prices[len(choices.precise)])]
    assert [count for count in tried if count] == [2, 4, 1]


def test_later_trials_build_on_dynamic_quantization_that_was_kept():
    steps = run(lambda choices: choices == replace(PLAIN, dynamic=True), ["a"], dynamic=True)
    assert all(choices.dynamic for _, choices in steps)
    late = run(lambda choices: choices.dynamic, ["a"], dynamic=True, price=lambda choices: 1.0 + choices.dynamic)
    assert [choices for _, choices in late[-2:]] == [replace(PLAIN, precise=("a",)), replace(PLAIN, dynamic=True)]


LOSSES = MappingProxyType({"a": 9.0, "b": 1.0, "c": 0.1, "d": 0.01})


def test_sites_that_lose_most_alone_are_precise_when_nothing_else_is_left_and_no_set_twice():
    tried = [choices.precise for _, choices in run(lambda choices: False, "dcba", alone=LOSSES) if choices.precise]
    assert tried == [("d",), ("d", "c"), ("a",), ("a", "b"), ("a", "b", "c")]
    tried = [choices.precise for _, choices in run(lambda choices: False, "bacd", alone=LOSSES) if choices.precise]
    assert tried == [("b",), ("b", "a"), ("a",), ("a", "b", "c")]


@pytest.mark.parametrize(("prices", "counts"), [
    ((1.0, SAME, 2.0), [1, 2, 3]), ((1.5, 1.0, 0.99), [2, 3, 1]), ((3.0, 2.0, 1.0), [3, 2, 1]),
])
def test_of_sets_with_the_same_run_time_the_fewest_sites_come_first(prices, counts):
    steps = run(lambda choices: False, alone=LOSSES, price=lambda choices: (0.0, *prices)[len(choices.precise)])
    assert [len(choices.precise) for _, choices in steps if choices.precise] == counts


def test_sites_are_ranked_again_where_dynamic_quantization_was_kept_meanwhile():
    kept = [PLAIN]

    def ranked():
        return Ranking((), {"x": 1.0, "y": 0.1}) if kept[-1].dynamic else Ranking(("a",), {})

    order = trial_order(lambda: kept[-1], ranked, lambda choices: 1.0 + choices.dynamic, dynamic=True)
    for step, choices in order:
        kept += [choices] if step == DYNAMIC or choices.dynamic else []
    assert kept[-1] == Choices("min_max", precise=("x",), dynamic=True)
