"""Formulas in small ops are found, and only those."""

import pytest
import torch
from torch import nn

import qtk
from qtk.graph.op_table import ROWS
from qtk.graph.sites import value_site
from qtk.planning.patterns import PATTERNS, match_patterns
from tests.zoo.spelled_out import NEAR_MISSES, SPELLINGS, WIDTH, Formula, bert_gelu, llama, moments_twice, shared_half

X = torch.randn(4, WIDTH)


def matches(*functions):
    model = nn.Sequential(*(Formula(function) for function in functions)).eval()
    graph = qtk.prepare_model(model, X).graph
    return match_patterns(graph), graph


@pytest.mark.sample(4)
@pytest.mark.parametrize(("kind", "function"), SPELLINGS)
def test_a_spelling_is_one_formula_that_makes_the_output(kind, function):
    found, graph = matches(function)
    assert [match.kind for match in found] == [kind]
    last = graph.output_node().all_input_nodes[0]
    assert found[0].nodes[-1] is last


@pytest.mark.parametrize("function", NEAR_MISSES)
def test_a_near_miss_is_none(function):
    assert matches(function)[0] == []


@pytest.mark.medium
def test_parameters_are_told_from_data():
    (norm,), _ = matches(moments_twice)
    assert (norm.weight.target, norm.bias.target) == ("0.w", "0.b")
    (norm,), _ = matches(llama)
    assert (norm.weight.target, norm.bias) == ("0.w", None)


def test_a_factor_that_is_data_is_no_weight():
    (norm,), _ = matches(lambda m, x: (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)) * (x + m.b))
    assert norm.weight is None
    assert norm.nodes[-1].users  # the product with data comes after it


def test_a_constant_may_be_shared_between_formulas():
    found, _ = matches(shared_half)
    assert [match.kind for match in found] == ["gelu", "gelu"]
    assert set(found[0].nodes).isdisjoint(found[1].nodes)


@pytest.mark.medium
def test_formulas_in_a_row_do_not_overlap():
    found, _ = matches(llama, bert_gelu, moments_twice)
    assert [match.kind for match in found] == ["rms_norm", "gelu", "layer_norm"]


def test_every_kind_of_the_op_table_keeps_its_name():
    named = {pattern.kind for pattern in PATTERNS} & {row.kind for row in ROWS.values()}
    assert {"layer_norm", "rms_norm", "gelu", "silu", "hardswish", "mish", "softmax"} <= named


@pytest.mark.sample(8)
@pytest.mark.parametrize(("kind", "function"), SPELLINGS)
def test_only_the_last_value_of_a_formula_is_quantized(kind, function):
    prepared = qtk.prepare_model(Formula(function).eval(), X)
    (match,) = match_patterns(prepared.graph)
    plan = qtk.QuantSim(prepared, X).plan
    *inner, last = (value_site(node) for node in match.nodes)
    assert not set(inner) & set(plan)
    assert plan[last].reason.startswith(kind)


@pytest.mark.medium
def test_a_norm_in_small_ops_keeps_its_parameters_in_float_by_default_and_takes_the_rules_of_its_op():
    model = Formula(moments_twice).eval()
    assert not {"w", "b"} & {site.name for site in qtk.QuantSim(model, X).plan}
    rules = [{"match": {"op": "layer_norm"}, "weight": {"bits": 16}, "output": {"bits": 16}}]
    plan = qtk.QuantSim(model, X, config={"version": 1, "rules": rules}).plan
    widths = {site.name: decided.spec.dtype.bits for site, decided in plan.items()}
    assert widths["w"] == 16
    assert [bits for name, bits in widths.items() if name.endswith(":out")] == [16]


def test_a_linear_before_a_spelled_out_gelu_is_one_supergroup_with_it():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Formula(bert_gelu)).eval()
    plan = qtk.QuantSim(model, X).plan
    assert plan.unquantized[next(site for site in plan.unquantized if site.name == "0:out")].endswith("linear → gelu")
