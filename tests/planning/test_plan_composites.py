import functools

import pytest
import torch
from torch import nn

import qtk
from qtk.config.load import load_config
from qtk.core.width import FROM_CONFIG
from qtk.errors import ConfigError
from qtk.planning.planner import plan
from tests.planning.plans import BARE, by_name, leaders, plan_of


class Tagger(nn.Module):
    def __init__(self, *, bidirectional):
        super().__init__()
        self.lstm = nn.LSTM(4, 3, batch_first=True, bidirectional=bidirectional)

    def forward(self, x):
        return torch.tanh(self.lstm(x)[0])


X = torch.randn(2, 5, 4)


@pytest.mark.medium
def test_a_composite_is_planned_inside_and_its_result_not_again_outside():
    decided = by_name(plan_of(Tagger(bidirectional=False), X))
    assert {"lstm.l0.cell.forget_gate:out", "lstm.l0.cell.hidden:out"} <= decided.keys()
    assert not any(name.startswith("lstm:out") for name in decided)
    assert "lstm.weight_ih_l0" in decided


@pytest.mark.medium
def test_both_directions_of_a_layer_share_the_encoding_of_their_joined_results():
    followers = leaders(plan_of(Tagger(bidirectional=True), X))
    (follower,) = [name for name, leader in followers.items() if name.startswith("lstm.l0_reverse.cell")]
    assert followers[follower] == follower.replace("l0_reverse", "l0")
    assert not leaders(plan_of(Tagger(bidirectional=False), X))


@pytest.mark.medium
def test_rules_name_all_ops_inside():
    config = {**BARE, "rules": [{"match": {"op": "lstm_cell"}, "output": {"bits": 16}}]}
    decided = by_name(plan_of(Tagger(bidirectional=False), X, config))
    assert {d.spec.dtype.bits for name, d in decided.items() if name.startswith("lstm.l0.cell.")} == {16}
    assert decided["tanh:out"].spec.dtype.bits == 8


INSIDE = {"match": {"op": "lstm"}, "inside": "float"}


@pytest.mark.medium
def test_float_inside_quantizes_inputs_weights_and_outputs_alone():
    plan = plan_of(Tagger(bidirectional=True), X, {**BARE, "rules": [INSIDE]})
    assert {name for name in by_name(plan) if name.startswith("lstm")} == {
        "lstm.weight_ih_l0", "lstm.weight_hh_l0", "lstm.weight_ih_l0_reverse", "lstm.weight_hh_l0_reverse",
        "lstm:out[0]",
    }
    reasons = {site.name: reason for site, reason in plan.unquantized.items()}
    assert reasons["lstm.l0.cell.hidden:out"] == "inside is float by rules[0]"


@pytest.mark.slow
def test_a_later_rule_quantizes_the_inside_again():
    rules = [INSIDE, {"match": {"path": "lstm"}, "inside": "quantized"}]
    plain, again = (by_name(plan_of(Tagger(bidirectional=True), X, {**BARE, "rules": r})) for r in ([], rules))
    assert plain.keys() == again.keys()


@pytest.mark.medium
def test_a_rule_for_the_inside_of_no_composite_has_no_effect():
    rules = [{"match": {"op": "tanh"}, "inside": "float"}]
    with pytest.raises(ConfigError, match=r"rules\[0\] \(op tanh\): .* has no inside"):
        plan_of(Tagger(bidirectional=False), X, {**BARE, "rules": rules})


@pytest.mark.medium
def test_an_excluded_composite_is_not_opened():
    prepared = qtk.prepare_model(Tagger(bidirectional=False).eval(), X, modules_to_exclude=["lstm"])
    assert not [name for name in qtk.QuantSim(prepared, X).quantizers if name.startswith("lstm.")]


DYNAMIC = {"match": {"op": ["lstm", "gru"]}, "inside": "dynamic"}
INT8 = {"weight": {"bits": 8, "symmetric": True, "granularity": "per_channel"}}
CONFIGURED = {"weight_bits": FROM_CONFIG, "activation_bits": FROM_CONFIG}


class Net(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x)[0]


@pytest.mark.medium
def test_dynamic_inside_quantizes_weights_and_what_products_read():
    plan = plan_of(Tagger(bidirectional=False), X, {**BARE, "defaults": INT8, "rules": [DYNAMIC]}, **CONFIGURED)
    inside = {name: each for name, each in by_name(plan).items() if name.startswith("lstm.l0")}
    assert list(inside) == ["lstm.l0.projection:in[0]", "lstm.l0.cell.hidden_projection:in[0]"]
    assert {(str(each.spec.dtype), each.spec.dynamic, each.spec.symmetric) for each in inside.values()} == {
        ("uint8", True, False)}
    reasons = {site.name: reason for site, reason in plan.unquantized.items()}
    assert reasons["lstm.l0.cell.gates:out"] == "inside is dynamic by rules[0]"


@pytest.mark.sample(2)
@pytest.mark.medium
@pytest.mark.parametrize(("net", "x", "defaults", "missing"), [
    (nn.GRU(4, 3), X, INT8, "gru"), (nn.LSTM(4, 3, proj_size=2), X, INT8, "projected states"),
    (nn.LSTM(4, 3).half(), X.half(), INT8, "float16"),
    (nn.LSTM(4, 3), X, {**INT8, "activation": {"bits": 16}}, "activations of uint16"),
    (nn.LSTM(4, 3), X, {**INT8, "activation": "float"}, "activations of float"),
    (nn.LSTM(4, 3), X, {"weight": {**INT8["weight"], "bits": 4}}, "weights of int4"),
])
def test_where_no_kernel_is_dynamic_the_inside_is_float(net, x, defaults, missing):
    plan = plan_of(Net(net), x, {**BARE, "defaults": defaults, "rules": [DYNAMIC]}, **CONFIGURED)
    assert not [name for name in by_name(plan) if ".l0." in name]
    (reason,) = {reason for site, reason in plan.unquantized.items() if site.name.endswith("projection:out")}
    assert reason.startswith(f"inside is float, for no dynamic kernel computes {missing}")


@pytest.mark.medium
def test_what_a_net_reads_is_rounded_only_if_it_computes_with_codes():
    rule = {"match": {"op": "lstm"}, "inside": "quantized"}
    plain, quantized = (by_name(plan_of(Tagger(bidirectional=False), X, {
        "version": 1, "extends": "onnxruntime", "rules": rules}, **CONFIGURED)) for rules in ([], [rule]))
    assert not plain.keys() & {"x:input", "lstm:in[0]"}
    assert "lstm:in[0]" in quantized


@pytest.mark.medium
def test_rules_set_layers_by_their_paths():
    rules = [DYNAMIC, {"match": {"path": "net.l1"}, "inside": "float"}, {"match": {"path": "net.l2"}, "inside": "int8"}]
    decided = by_name(plan_of(Net(nn.LSTM(4, 3, 3)), X, {**BARE, "defaults": INT8, "rules": rules}, **CONFIGURED))
    counts = [sum(name.startswith(f"net.l{layer}.") for name in decided) for layer in range(3)]
    assert counts[:2] == [2, 0]
    assert counts[2] > 5
    with pytest.raises(ConfigError, match=r"no op has the path net\.l3"):
        plan_of(Net(nn.LSTM(4, 3)), X, {**BARE, "rules": [{"match": {"path": "net.l3"}, "inside": "float"}]})


class Deep(nn.Module):
    def __init__(self, **settings):
        super().__init__()
        self.lstm = nn.LSTM(4, 3, 2, batch_first=True, **settings)

    def forward(self, x):
        return self.lstm(x)[0]


@functools.cache
def prepared_deep():
    return qtk.prepare_model(Deep().eval(), X)


def deep_plan(rules, *, defaults=None, activation_bits=8):
    config = load_config({**BARE, "rules": rules, "defaults": defaults or {"weight": {"bits": 8}}})
    return plan(prepared_deep(), config, weight_bits=FROM_CONFIG, activation_bits=activation_bits, scheme="min_max")


@pytest.mark.medium
def test_rules_set_the_weights_of_one_layer_and_direction_apart():
    rules = [
        {"match": {"path": "lstm"}, "weight": {"bits": 6}}, {"match": {"path": "lstm.l1"}, "weight": {"bits": 4}},
        {"match": {"path": "lstm.l0_reverse"}, "weight": "float"},
        {"match": {"path": "lstm.weight_hh_l1_reverse"}, "weight": {"bits": 3}},
        {"match": {"path": "*.bias_ih_l0"}, "bias": {"bits": 16, "symmetric": True}},
    ]
    found = by_name(plan_of(Deep(bidirectional=True), X, {**BARE, "rules": rules}, weight_bits=8))
    assert {name.removeprefix("lstm."): each.spec.dtype.bits for name, each in found.items() if each.static} == {
        "weight_ih_l0": 6, "weight_hh_l0": 6, "bias_ih_l0": 16, "weight_ih_l1": 4, "weight_hh_l1": 4,
        "weight_ih_l1_reverse": 6, "weight_hh_l1_reverse": 3,
    }


@pytest.mark.medium
def test_a_layer_in_few_bits_computes_what_torch_does_with_rounded_weights():
    torch.manual_seed(0)
    net = Deep().eval()
    rules = [{"match": {"path": "lstm.l1"}, "weight": {"bits": 3, "scheme": "min_max"}}]
    sim = qtk.QuantSim(net, X, weight_bits=8, activation_bits=None, config={"version": 1, "rules": rules})
    sim.compute_encodings(None, progress=False)
    with torch.no_grad():
        for name, weight in net.named_parameters():
            if "weight" in name:
                most = 3 if "l1" in name else 127
                scale = max(weight.max() / most, -weight.min() / (most + 1))
                weight.copy_((weight / scale).round().clamp(-most - 1, most) * scale)
        torch.testing.assert_close(sim.model(X), net(X), atol=1e-5, rtol=1e-5)


@pytest.mark.medium
def test_a_layer_whose_weights_have_no_dynamic_kernel_is_float_alone():
    rules = [{"match": {"op": "lstm"}, "inside": "dynamic"}, {"match": {"path": "lstm.l1"}, "weight": {"bits": 4}}]
    found = deep_plan(rules, defaults=INT8, activation_bits=FROM_CONFIG)
    assert {name for name in by_name(found) if ":in[0]" in name} >= {"lstm.l0.projection:in[0]"}
    reasons = {site.name: why for site, why in found.unquantized.items()}
    assert "no dynamic kernel computes weights of int4" in reasons["lstm.l1.cell.gates:out"]


@pytest.mark.medium
@pytest.mark.parametrize(("rule", "message"), [
    ({"match": {"path": "lstm.l2"}, "weight": {"bits": 4}}, r"no op has the path lstm.l2; did you mean .*lstm.l"),
    ({"match": {"path": "lstm.weight_ih_l2"}, "weight": {"bits": 4}}, r"did you mean .*lstm.weight_ih_l"),
    ({"match": {"path": "lstm.l1"}, "output": {"bits": 4}}, r"no op has the path lstm.l1"),
    ({"match": {"path": "lstm.l1"}, "weight": {"bits": 4}, "output": {"bits": 4}},
     r"output .*is a part of lstm, of which rules set weight, bias and inside"),
    ({"match": {"path": "lstm.weight_ih_l1"}, "bias": {"bits": 16}}, r"bias .*"),
])
def test_what_a_part_does_not_have_is_an_error(rule, message):
    with pytest.raises(ConfigError, match=message):
        deep_plan([rule])
