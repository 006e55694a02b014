import pytest
import torch
from torch import nn

import qtk
from qtk.core.width import FROM_CONFIG
from qtk.errors import ConfigError
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


@pytest.mark.medium
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
