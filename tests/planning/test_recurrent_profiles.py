import pytest
import torch
from torch import nn

from tests.planning.plans import by_name, plan_of

X = torch.randn(2, 5, 4)


class Streaming(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 8, batch_first=True)

    def forward(self, x, h, c):
        return self.lstm(x, (h, c))


def bits(model, inputs, rule=None, **config):
    """Site name → bits; ``None`` in float."""
    rules = [] if rule is None else [rule]
    plan = plan_of(model.eval(), inputs, {"version": 1, "rules": rules, **config})
    quantized = {name: each.spec.dtype.bits for name, each in by_name(plan).items()}
    return quantized | {site.name: None for site in plan.unquantized}


@pytest.mark.medium
def test_sums_and_cell_state_have_16_bits_and_partial_products_none():
    plan = plan_of(nn.LSTM(4, 8).eval(), X)
    sites = by_name(plan)
    gates, state = sites["lstm.l0.cell.gates:out"], sites["lstm.l0.cell.cell.addcmul:out"]
    assert (gates.spec.dtype.bits, gates.range) == (16, (-8.0, 8 - 2**-12))
    assert (state.spec.dtype.bits, state.range) == (16, None)
    assert sites["lstm.l0.cell.hidden:out"].spec.dtype.bits == 8
    assert {"lstm.l0.projection:out", "lstm.l0.cell.hidden_projection:out"} <= {site.name for site in plan.unquantized}


@pytest.mark.medium
def test_a_gru_rounds_what_is_summed_once():
    found = bits(nn.GRU(4, 8), X)
    assert [found[f"gru.l0.{name}:out"] for name in ("projection", "cell.hidden_projection", "cell.reset_hidden")] == [
        None] * 3
    assert found["gru.l0.cell.hidden:out"] == 8


@pytest.mark.medium
def test_a_first_cell_state_has_the_bits_of_the_state():
    states = torch.zeros(1, 2, 8), torch.zeros(1, 2, 8)
    found = bits(Streaming(), (X, *states))
    assert (found["h:input"], found["c:input"]) == (8, 16)
    int8 = bits(Streaming(), (X, *states), {"match": {"op": "lstm"}, "inside": "int8"})
    assert (int8["h:input"], int8["c:input"], int8["lstm.l0.cell.gates:out"]) == (8, 8, 8)


@pytest.mark.medium
def test_a_rule_for_the_values_inside_outranks_the_profile():
    found = bits(nn.LSTM(4, 8), X, {"match": {"op": "lstm_cell"}, "output": {"bits": 4}})
    assert {found[f"lstm.l0.{name}:out"] for name in ("cell.gates", "cell.cell.addcmul", "projection")} == {4}


@pytest.mark.medium
def test_floats_and_dynamic_ranges_stay_what_they_are():
    weights_only = bits(nn.LSTM(4, 8), X, defaults={"activation": "float"})
    assert weights_only["lstm.l0.cell.gates:out"] is None
    dynamic = by_name(plan_of(nn.LSTM(4, 8).eval(), X, {"version": 1, "defaults": {"activation": {"dynamic": True}}}))
    assert dynamic["lstm.l0.cell.gates:out"].spec.dtype.bits == 8
