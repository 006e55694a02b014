import pytest

from qtk.core.site import Site


@pytest.mark.parametrize(
    ("site", "name"),
    [
        (Site.parameter("blocks.0.attn.qkv.weight"), "blocks.0.attn.qkv.weight"),
        (Site.parameter("weight"), "weight"),
        (Site("blocks.0.attn.qkv", "", "out"), "blocks.0.attn.qkv:out"),
        (Site("blocks.0", "add_1", "out"), "blocks.0.add_1:out"),
        (Site("", "add", "in[0]"), "add:in[0]"),
        (Site("", "x", "input"), "x:input"),
    ],
)
def test_the_name_says_module_op_and_port(site, name):
    assert site.name == str(site) == name


def test_sites_are_values_in_a_fixed_order():
    assert Site("a", "b", "out") == Site("a", "b", "out")
    assert sorted([Site("b", "", "out"), Site("a", "x", "out"), Site("a", "", "out")]) == [
        Site("a", "", "out"), Site("a", "x", "out"), Site("b", "", "out")
    ]
