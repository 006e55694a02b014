import json

import pytest

from qtk.core.dtypes import dtype
from qtk.core.granularity import PerBlock, PerChannel
from qtk.core.plan import QuantPlan, SitePlan
from qtk.core.site import Site
from qtk.core.spec import QuantSpec
from qtk.errors import EncodingError
from qtk.export.plan_json import plan_from_json, plan_to_json


@pytest.fixture
def plan():
    weight, out, edge = Site.parameter("a.fc.weight"), Site("a.fc", "", "out"), Site("", "concat_1", "in[0]")
    return QuantPlan(
        {
            weight: SitePlan(QuantSpec(dtype("int4"), PerBlock((1, -1)), symmetric=True), "mse", True, reason="r"),
            out: SitePlan(QuantSpec(dtype("uint8")), "min_max", range=(0.0, 1.0)),
            edge: SitePlan(QuantSpec(dtype("uint8"), PerChannel(-1)), "min_max", leader=out),
        },
        {Site("a@1", "relu", "out"): "inside a supergroup"},
    )


def test_round_trip_through_text(plan):
    back = plan_from_json(json.loads(json.dumps(plan_to_json(plan))))
    assert dict(back.sites) == dict(plan.sites)
    assert list(back) == list(plan)
    assert dict(back.unquantized) == dict(plan.unquantized)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sites": None}, "not a plan"),
        ({"unquantized": ["ab", 3]}, "not a site"),
        ({"unquantized": [3]}, "not a site and the reason"),
        ({"unquantized": [[["a", "b", "out"], None]]}, "not a site and the reason"),
        ({"site": ["a", "b"]}, "not a site"),
        ({"range": [0, 10**400]}, "not a plan for a site"),
        ({"spec": {"dtype": "int4"}}, "not a quantization spec"),
        ({"scheme": 3}, "not a plan for a site"),
        ({"range": [0.0]}, "not a plan for a site"),
        ({"range": ["low", "high"]}, "not a plan for a site"),
        ({"leader": [1, 2, 3]}, "not a site"),
    ],
)
def test_malformed_plans(change, message, plan):
    data = plan_to_json(plan)
    if change.keys() & data.keys():
        data |= change
    else:
        data["sites"][0] |= change
    with pytest.raises(EncodingError, match=message):
        plan_from_json(data)
