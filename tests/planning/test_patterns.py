"""Formulas in small ops are found, and only those."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import qtk
from qtk.graph.sites import value_site
from qtk.operators.op_table import ROWS
from qtk.planning import patterns
from qtk.planning.normal_form import NormalForm
from qtk.planning.patterns import PATTERNS, match_patterns, matchers_of
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


@pytest.mark.medium
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


class SmallCnn(nn.Module):
    """Convolutions, ReLU6, a residual sum, a concat, pooling."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.inner, self.head = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(8, 2)

    def forward(self, x):
        x = F.relu6(self.norm(self.stem(x)))
        x = x + F.relu6(self.inner(x) + 3)
        x = torch.cat((F.adaptive_avg_pool2d(x, 1), F.adaptive_max_pool2d(x, 1)), 1)
        return self.head(x.flatten(1)).softmax(-1)


@pytest.fixture
def traced(monkeypatch):
    """The codes that are traced while the test runs, as in a fresh process."""
    codes, trace = [], patterns.trace
    caches = patterns.normal_form, patterns.matchers_of
    monkeypatch.setattr(patterns, "trace", lambda code: codes.append(code) or trace(code))
    for cache in caches:
        cache.cache_clear()
    return codes


def test_a_small_cnn_traces_no_spelling(traced):
    match_patterns(qtk.prepare_model(SmallCnn().eval(), torch.randn(2, 1, 8, 8)).graph)
    assert traced == []


def test_a_formula_is_traced_once_and_only_where_its_ops_are(traced):
    for _ in range(2):
        assert [match.kind for match in matches(bert_gelu)[0]] == ["gelu"]
    rows = [pattern for pattern in PATTERNS if torch.ops.aten.erf.default in pattern.ops]
    assert traced == [code for row in rows for code in (*row.spellings, *row.products)]


def test_every_way_to_write_a_pattern_has_its_ops():
    missing = [(pattern.kind, pattern.ops - matcher.targets) for pattern in PATTERNS
               for matcher in matchers_of(pattern) if not pattern.ops <= matcher.targets]
    assert missing == []


def written_out(core, product):
    """One code that computes the core and then the product."""
    of_core, of_product = (list(inspect.signature(code).parameters.values()) for code in (core, product))

    def code(*values):
        return product(*core(*values[:len(of_core)]), *values[len(of_core):])

    code.__signature__ = inspect.Signature([*of_core, *of_product[2:]])
    return code


@pytest.mark.sample(3)
@pytest.mark.parametrize("pattern", [pattern for pattern in PATTERNS if pattern.products])
def test_a_product_of_a_core_matches_as_if_it_were_written_out(pattern):
    ways = [written_out(core, product) for core in pattern.spellings for product in pattern.products]
    for matcher, way in zip(matchers_of(pattern), ways, strict=True):
        whole = NormalForm(patterns.trace(way)).graph
        whole.eliminate_dead_code()
        assert nested(matcher.result) == nested(whole.output_node().args[0])


def nested(value):
    """A normal form as a tree: ops with their operands; placeholders by name."""
    if not isinstance(value, fx.Node):
        return tuple(map(nested, value)) if isinstance(value, (list, tuple)) else value
    if value.op == "placeholder":
        return value.target
    return value.target, nested(value.args), sorted(value.kwargs.items())


def test_every_kind_of_the_op_table_keeps_its_name():
    named = {pattern.kind for pattern in PATTERNS} & {row.kind for row in ROWS.values()}
    assert {"layer_norm", "rms_norm", "gelu", "silu", "hardswish", "mish", "softmax"} <= named


@pytest.mark.medium
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
