import pytest
import torch
from torch import nn

import qtk
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
