import pytest
import torch
from torch import nn

from qtk.core.granularity import PerTokenBlock
from qtk.core.spec import ScaleFormat
from qtk.errors import ConfigError
from tests.planning.plans import BARE, ConvReluConv, by_name, plan_of


def test_an_input_rule_puts_a_second_quantizer_on_the_edge():
    config = {**BARE, "rules": [{"match": {"path": "conv2"}, "input": {"bits": 16}}]}
    decided = by_name(plan_of(ConvReluConv(), torch.randn(2, 3, 9, 9), config))
    assert decided["conv2:in[0]"].spec.dtype.bits == 16
    assert decided["relu:out"].spec.dtype.bits == 8


class Stream(nn.Module):
    """A value that a norm and a linear layer read."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        y = self.first(x)
        return self.norm(y), self.second(y)


@pytest.mark.parametrize(("elsewhere", "expected"), [({"bits": 8}, 8), ("float", None)], ids=["8 bits", "float"])
def test_what_reads_a_stream_beside_its_norm_reads_it_as_other_values_are(elsewhere, expected):
    rules = [{"match": {"op": "linear"}, "output": elsewhere},
             {"match": {"op": "linear", "feeds": ["layer_norm"]}, "output": {"bits": 16}}]
    decided = by_name(plan_of(Stream(), torch.randn(2, 8), {**BARE, "rules": rules}))
    assert decided["first:out"].spec.dtype.bits == 16
    found = decided.get("second:in[0]")
    assert (found and found.spec.dtype.bits) == expected


class Products(nn.Module):
    """What a convolution, linear layers and attention sum over, and a sum that nothing multiplies."""

    def __init__(self):
        super().__init__()
        self.conv, self.q, self.kv = nn.Conv2d(3, 8, 3), nn.Linear(8, 8), nn.Linear(8, 16)

    def forward(self, x):
        x = self.conv(x).flatten(2).mT
        q, (k, v) = self.q(x), self.kv(x).chunk(2, -1)
        return nn.functional.scaled_dot_product_attention(q, k, v) + q


@pytest.mark.parametrize("rule", [False, True])
def test_activations_in_blocks_are_rounded_along_the_axis_that_their_product_sums_over(rule):
    setting = {"dtype": "mxfp4"}
    config = {**BARE, "rules": [{"match": {"op": ["conv", "linear", "matmul"]}, "input": setting}]} if rule else {
        **BARE, "defaults": {"activation": setting}}
    decided = plan_of(Products(), torch.randn(2, 3, 6, 6), config, activation_bits=8 if rule else 4)
    specs = {site.name: each.spec for site, each in decided.items() if isinstance(each.spec.granularity, PerTokenBlock)}
    axes = {name: spec.granularity.axis for name, spec in specs.items()}
    assert (axes["conv:in[0]"], axes["q:in[0]"], axes["kv:in[0]"]) == (-3, -1, -1)
    inside = [axis for name, axis in axes.items() if ".core." in name]
    assert inside == [-1, -2, -1, -2]  # q, k transposed; the scores, v
    assert {(spec.granularity.length, spec.dynamic, spec.scale_format) for spec in specs.values()} == {
        (32, True, ScaleFormat.E8M0)}
    if not rule:
        assert len(axes) == 7
        assert not [name for name in by_name(decided) if ":out" in name or ":input" in name]


def test_nvfp4_is_calibrated_unless_it_says_dynamic_and_what_has_no_effect_is_an_error():
    for setting, dynamic in (({"dtype": "nvfp4"}, False), ({"dtype": "nvfp4", "dynamic": True}, True),
                             ({"dtype": "fp8_e4m3", "granularity": "per_block", "block_size": 4}, True)):
        config = {**BARE, "rules": [{"match": {"path": "conv2"}, "input": setting}]}
        spec = by_name(plan_of(ConvReluConv(), torch.randn(2, 3, 9, 9), config))["conv2:in[0]"].spec
        assert (spec.dynamic, spec.symmetric) == (dynamic, True if setting["dtype"] == "nvfp4" else spec.symmetric)
    config = {**BARE, "rules": [{"match": {"op": "layer_norm"}, "input": {"dtype": "mxfp4"}}]}
    with pytest.raises(ConfigError, match="a rule has no effect"):
        plan_of(Stream(), torch.randn(2, 8), config)
