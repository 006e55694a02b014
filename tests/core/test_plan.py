import dataclasses

import pytest

from qtk.core.dtypes import dtype
from qtk.core.plan import QuantPlan, SitePlan, leaders
from qtk.core.site import Site
from qtk.core.spec import QuantSpec
from qtk.errors import CalibrationError

WEIGHT, OUTPUT, OTHER = Site.parameter("fc.weight"), Site("fc", "", "out"), Site("", "add", "out")
EIGHT = SitePlan(QuantSpec(dtype("int8"), symmetric=True), "min_max", static=True, reason="default")
FOUR = SitePlan(QuantSpec(dtype("int4"), symmetric=True), "min_max", static=True, reason="rules[0]")
ACTIVATION = SitePlan(QuantSpec(dtype("uint8")), "min_max")


def test_it_is_a_mapping_in_graph_order():
    plan = QuantPlan({OUTPUT: ACTIVATION, WEIGHT: EIGHT})
    assert list(plan) == [OUTPUT, WEIGHT]
    assert len(plan) == 2
    assert plan[WEIGHT] is EIGHT
    assert OTHER not in plan


def test_a_plan_differs_from_itself_nowhere():
    plan = QuantPlan({WEIGHT: EIGHT})
    assert plan.diff(QuantPlan({WEIGHT: dataclasses.replace(EIGHT)})) == []


def test_diff_says_what_is_only_here_only_there_and_otherwise():
    lines = QuantPlan({WEIGHT: EIGHT, OTHER: ACTIVATION}).diff(QuantPlan({WEIGHT: FOUR, OUTPUT: ACTIVATION}))
    assert lines == [
        "- add:out: uint8 per_tensor asymmetric",
        "+ fc:out: uint8 per_tensor asymmetric",
        "~ fc.weight: int8 per_tensor symmetric → int4 per_tensor symmetric",
    ]


def test_diff_sees_more_than_the_spec():
    lines = QuantPlan({WEIGHT: EIGHT}).diff(QuantPlan({WEIGHT: dataclasses.replace(EIGHT, leader=OTHER)}))
    assert len(lines) == 1
    assert lines[0].startswith("~ fc.weight")


def test_it_prints_one_line_a_site_with_the_deciding_rule():
    plan = QuantPlan(
        {
            WEIGHT: EIGHT,
            OUTPUT: dataclasses.replace(ACTIVATION, leader=OTHER, reason="concat"),
            OTHER: dataclasses.replace(ACTIVATION, range=(0.0, 1.0)),
        },
        {Site("fc", "", "in[0]"): "shape arithmetic"},
    )
    lines = str(plan).splitlines()
    assert [line.split("  ")[0] for line in lines] == ["fc.weight", "fc:out", "add:out", "fc:in[0]"]
    expected = ["(default)", "as add:out", "range (0.0, 1.0)", "float  (shape arithmetic)"]
    for line, words in zip(lines, expected, strict=True):
        assert words in line


def test_a_decision_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        EIGHT.scheme = "mse"


FIRST, SECOND, CAT = Site("a", "add", "out"), Site("a", "mul", "out[1]"), Site("a", "concat", "out")
SPEC = QuantSpec(dtype("uint8"))
PLAN = QuantPlan({
    FIRST: SitePlan(SPEC, "min_max", leader=CAT), SECOND: SitePlan(SPEC, "min_max"), CAT: SitePlan(SPEC, "min_max"),
})


@pytest.mark.parametrize(
    ("names", "selected"),
    [
        (None, [SECOND, CAT]),
        ("a.mul:out[1]", [SECOND]),  # brackets are no glob
        ("a.add:out", [CAT]),  # a follower selects its leader
        (["a.c*", "a.mul*"], [SECOND, CAT]),  # in the order of the plan
    ],
)
def test_names_and_globs_select_leaders(names, selected):
    assert list(leaders(PLAN, names)) == selected


def test_a_name_of_no_site_is_answered_with_the_nearest():
    with pytest.raises(CalibrationError, match=r"no site is called 'a\.ad:out'; did you mean 'a\.add:out'"):
        leaders(PLAN, "a.ad:out")


@pytest.mark.parametrize("name", ["head.weight", "head*"])
def test_a_site_in_float_is_told_with_its_reason(name):
    plan = QuantPlan(PLAN.sites, {Site.parameter("head.weight"): "float by rules[4]"})
    with pytest.raises(CalibrationError, match=r"^head\.weight is in float: float by rules\[4\]; choose sites"):
        leaders(plan, name)
