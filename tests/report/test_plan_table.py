"""Plans as tables."""

from qtk.core.dtypes import dtype
from qtk.core.granularity import PerChannel
from qtk.core.plan import QuantPlan, SitePlan
from qtk.core.site import Site
from qtk.core.spec import QuantSpec
from qtk.report.plan_table import plan_summary, plan_table, unquantized_table

WEIGHT, ADD = Site("fc", "weight", ""), Site("", "add", "out")
CAT, SOFT = Site("", "concat", "out"), Site("s", "", "out")
ACTIVATION = QuantSpec(dtype("uint8"))
PLAN = QuantPlan(
    {
        WEIGHT: SitePlan(
            QuantSpec(dtype("int4"), PerChannel(0), symmetric=True, narrow_range=True), "mse", static=True, reason="why"
        ),
        ADD: SitePlan(ACTIVATION, "min_max", leader=CAT),
        CAT: SitePlan(ACTIVATION, "min_max"),
        SOFT: SitePlan(ACTIVATION, "min_max", range=(0.0, 1.0)),
    },
    {Site("fc", "bias", ""): "float by defaults"},
)


def test_each_site_has_its_row_in_order():
    assert plan_table(PLAN).rows == (
        ("fc.weight", "int4", "per_channel(axis=0) symmetric narrow", "mse", "why"),
        ("add:out", "uint8", "per_tensor asymmetric", "as concat:out", ""),
        ("concat:out", "uint8", "per_tensor asymmetric", "min_max", ""),
        ("s:out", "uint8", "per_tensor asymmetric", "range (0.0, 1.0)", ""),
    )


def test_what_is_left_in_float_has_its_reason():
    assert unquantized_table(PLAN).rows == (("fc.bias", "float by defaults"),)


def test_shared_encodings_count_as_one_quantizer():
    assert plan_summary(PLAN) == "3 quantizers: 1 × int4 symmetric, 2 × uint8 asymmetric; 1 values share one"
