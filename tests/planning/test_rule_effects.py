import functools

import pytest
import torch
from torch import nn

import qtk
from qtk.errors import ConfigError
from tests.planning import branching_net
from tests.planning.plans import BARE, by_name, plan_of


class Net(nn.Module):
    """Convolution, batch norm and ReLU, a second branch that is concatenated, a head."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1, self.relu = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()
        self.conv3 = nn.Conv2d(8, 8, 1)
        self.conv2, self.act, self.flatten, self.fc = nn.Conv2d(3, 8, 1), nn.Sigmoid(), nn.Flatten(), nn.Linear(1024, 4)

    def forward(self, x):
        first = self.relu(self.bn1(self.conv1(x)))
        return self.fc(self.flatten(torch.cat([self.conv3(first), self.act(self.conv2(x))], 1)))


X = torch.randn(2, 3, 8, 8)
FUSED = {**BARE, "supergroups": [["conv", "batch_norm", "relu"], ["conv", "relu"]]}


@functools.cache
def prepared():
    return qtk.prepare_model(Net().eval(), X)


def sim(*rules, config=FUSED, **widths):
    return qtk.QuantSim(prepared(), X, config={**config, "rules": rules}, **widths)


def decided(*rules):
    return by_name(sim(*rules, config={**FUSED, "fold_batch_norms": False}).plan)


@pytest.mark.medium
@pytest.mark.parametrize("path", ["conv1", "bn1", "conv*"])
@pytest.mark.parametrize("output", ["float", {"bits": 16}, {"dtype": "int12"}])
def test_a_rule_with_a_width_on_a_member_acts_on_the_output_of_the_supergroup(path, output):
    sites, plain = decided({"match": {"path": path}, "output": output}), decided()
    if output == "float":
        assert "relu:out" not in sites
    else:
        assert sites["relu:out"].spec.dtype.bits == (16 if "bits" in output else 12)
        assert sites["relu:out"].reason == "relu; rules[0]"
    assert "conv1:out" not in sites
    untouched = plain.keys() - {"relu:out", "conv2:out", "conv3:out"}  # these are in no supergroup
    assert {name: plain[name].spec for name in untouched} == {
        name: sites[name].spec for name in untouched}


def test_on_members_too_later_rules_win():
    first = {"match": {"path": "conv[12]"}, "output": {"bits": 16}}
    last = {"match": {"path": "relu"}, "output": {"bits": 12}}
    assert decided(first, last)["relu:out"].spec.dtype.bits == 12
    last["optional"] = True
    assert decided(last, first)["relu:out"].spec.dtype.bits == 16


def test_a_rule_acts_from_a_member_of_a_formula_spelled_out():
    class Gelu(nn.Module):
        def forward(self, x):
            return 0.5 * x * (1 + torch.erf(x / 2**0.5))

    config = {**BARE, "rules": [{"match": {"path": "erf"}, "output": {"bits": 12}}]}
    plan = plan_of(nn.Sequential(Gelu()), torch.randn(2, 8), {**BARE})
    (site,) = (site.name for site in plan if site.port == "out")
    inner = next(site.name for site in plan.unquantized if "erf" in site.name).partition(":")[0]
    config["rules"][0]["match"]["path"] = inner
    assert by_name(plan_of(nn.Sequential(Gelu()), torch.randn(2, 8), config))[site].spec.dtype.bits == 12


@pytest.mark.medium
@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"match": {"op": "conv", "path": "conv1"}, "output": {"symmetric": True}},
         r"rules\[0\]\.output \(op conv and path conv1\): conv1:out is inside supergroup conv → relu, whose output is "
         "relu:out; match that op"),
        ({"match": {"op": "conv2d", "path": "conv1"}, "output": {"range": [0.0, 1.0]}}, "whose output is relu:out"),
        ({"match": {"path": "relu"}, "weight": {"bits": 4}}, r"rules\[0\]\.weight \(path relu\): relu has no weight"),
        ({"match": {"path": "relu"}, "bias": {"bits": 8}}, "relu has no bias"),
        ({"match": {"path": "fc"}, "input": "float"},
         r"rules\[0\]\.input .*: concat:out, which it reads, is quantized at its producer, for all readers"),
        ({"match": {"path": "conv1"}, "input": "float"}, "x:input, which it reads, .* path x, and output: float"),
        ({"match": {"path": "flatten"}, "output": {"bits": 16}}, "moves the values of concat:out; match that op"),
        ({"match": {"path": "act"}, "output": {"bits": 16}}, "act:out shares the encoding of concat:out; match"),
        ({"match": {"path": "convl"}, "weight": {"bits": 4}}, "no op has the path convl; did you mean .*'conv1'"),
        ({"match": {"path": ["fc", "fcc*"]}, "weight": {"bits": 5}}, r"fc, fcc\*\): no op has the path fcc\*; did"),
        ({"match": {"path": "conv1", "op": "linear"}, "weight": {"bits": 4}},
         "no op at path conv1 meets op linear; there: conv, conv2d"),
        ({"match": {"op": "softmax"}, "output": {"bits": 16}}, r"rules\[0\] \(op softmax\): the model has no such op"),
        ({"match": {"path": "fc"}, "inside": "float"}, "fc has no inside"),
    ],
)
def test_a_rule_without_effect_is_an_error_that_says_what_overrules_it(rule, message):
    with pytest.raises(ConfigError, match=message):
        sim(rule)
    sim({**rule, "optional": True})


def test_a_rule_that_a_later_one_overrules_everywhere():
    rules = [{"match": {"path": "fc"}, "output": {"bits": 16}}, {"match": {"op": "linear"}, "output": {"bits": 12}}]
    with pytest.raises(ConfigError, match=r"rules\[0\]\.output .*: fc:out follows rules\[1\], which comes later"):
        sim(*rules)
    rules[0]["output"]["symmetric"] = True  # this much of it is left
    assert sim(*rules).quantizers["fc:out"].spec.symmetric


def test_a_rule_on_a_member_that_a_later_one_overrules_at_the_output_of_the_supergroup():
    rules = [{"match": {"path": "conv1"}, "output": {"bits": 16}}, {"match": {"op": "relu"}, "output": {"bits": 12}}]
    with pytest.raises(ConfigError, match=r"rules\[0\]\.output .*: relu:out follows rules\[1\], which comes later"):
        sim(*rules)


def test_a_rule_without_a_width_does_not_switch_on_what_is_off():
    rules = [{"match": {"path": "fc"}, "output": value} for value in ("float", {"symmetric": True})]
    with pytest.raises(ConfigError, match=r"rules\[1\].*: fc:out is float by rules\[0\]; give the rule a width"):
        sim(*rules)


def test_every_rule_without_effect_is_listed():
    rules = [{"match": {"path": "relu"}, "weight": {"bits": 4}}, {"match": {"path": "cnv2"}, "weight": {"bits": 4}}]
    with pytest.raises(ConfigError, match=r"(?s)2 rules.*rules\[0\]\.weight.*rules\[1\] .*optional: true"):
        sim(*rules)


@pytest.mark.medium
def test_the_path_of_a_module_around_others_says_which_glob_is_meant():
    net = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    config = {**BARE, "rules": [{"match": {"path": "0"}, "weight": {"bits": 4}}]}
    with pytest.raises(ConfigError, match=r"no op has the path 0: it is a module around others; write 0\.\*"):
        qtk.QuantSim(net, torch.randn(2, 4), config=config)


def test_a_batch_norm_that_was_folded_is_named():
    rule = {"match": {"path": "bn1"}, "weight": {"bits": 8}}
    with pytest.raises(ConfigError, match="no op has the path bn1: folded into conv1"):
        sim(rule)
    assert sim(rule, config={**FUSED, "fold_batch_norms": False}).plan


@pytest.mark.parametrize(
    "rule",
    [
        {"match": {"path": "fc"}, "weight": {"bits": 8}},  # says what holds anyway
        {"match": {"path": "fc"}, "output": "quantized"},
        {"match": {"path": "fc"}, "input": {"bits": 8}},
        {"match": {"path": "fc"}, "bias": "float"},
        {"match": {"op": ["relu", "softmax"]}, "output": {"bits": 16}},
        {"match": {"path": "*"}, "weight": {"bits": 4}, "input": {"bits": 16}, "output": {"bits": 12}},
    ],
)
def test_a_rule_that_agrees_with_what_holds_is_none(rule):
    assert sim(rule).plan


def test_a_rule_on_an_excluded_module_says_what_excludes_it():
    rules = [{"match": {"path": "fc", **more}, "weight": {"bits": 4}} for more in ({}, {"op": "linear"})]
    with pytest.raises(ConfigError, match=r"(?s)fc is excluded by exclude: fc.*fc is excluded by exclude: fc"):
        sim(*rules, config={**FUSED, "exclude": ["fc"]})


def test_an_input_rule_that_gives_a_scheme_acts_on_the_edge():
    quantizers = sim({"match": {"path": "fc"}, "input": {"scheme": "mse"}})
    assert quantizers.plan[next(site for site in quantizers.plan if site.name == "fc:in[0]")].scheme == "mse"


def test_a_rule_without_a_width_and_a_width_of_none_agree():
    sim({"match": {"op": "relu"}, "output": {"range": [0.0, 1.0]}}, activation_bits=None)
    sim({"match": {"op": "linear"}, "weight": {"symmetric": False}}, weight_bits=None)


@pytest.mark.parametrize("widths", [{"weight_bits": None}, {"activation_bits": None}])
def test_an_int32_bias_and_a_width_of_none_agree(widths):
    rule = {"match": {"op": "conv"}, "bias": {"dtype": "int32"}}
    assert "conv3.bias" not in sim(rule, **widths).quantizers
    with pytest.raises(ConfigError, match=r"rules\[1\]\.bias .*: conv3\.bias follows rules\[2\]"):
        sim(rule, {"match": {"path": "conv3"}, "bias": {"bits": 8}}, {"match": {"path": "conv3"}, "bias": {"bits": 6}},
            **widths)


def test_a_rule_on_what_is_excluded_says_so():
    rule = {"match": {"path": "left"}, "weight": {"bits": 4}}
    with pytest.raises(ConfigError, match="left is excluded by exclude: left"):
        branching_net.sim(lambda net, y: net.left(y), rules=[rule])


def test_a_constant_operand_says_when_it_is_in_float():
    class Standardized(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.randn(4))
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x - self.mean)

    def planned(*rules):
        return qtk.QuantSim(Standardized().eval(), torch.randn(2, 4), config={"version": 1, "rules": rules}).plan

    rule = {"match": {"path": "sub"}, "input": "float"}
    with pytest.raises(ConfigError, match="mean, a constant which it reads, stays in float where all other values"):
        planned(rule)
    plan = planned({"match": {"path": "x"}, "output": "float"})
    assert "mean" not in by_name(plan)
    assert "sub:out" in by_name(plan)
