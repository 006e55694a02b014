import pytest

from qtk.core.dtypes import dtype
from qtk.core.plan import QuantPlan, SitePlan
from qtk.core.site import Site
from qtk.core.spec import QuantSpec
from qtk.errors import CalibrationError
from qtk.planning.selection import leaders

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
