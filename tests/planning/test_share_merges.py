import pytest
import torch
from torch import nn

import qtk
from qtk.errors import SpecError
from tests.planning.plans import BARE, by_name, leaders, plan_of

CODES = {**BARE, "rules": [{"match": {"op": "concat"}, "output": {"bits": 8}}]}
"""A concatenation is quantized, whatever reads it."""


class Concats(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(8, 2)

    def forward(self, x):
        a, b = self.a(x), self.b(x)
        return self.head(torch.cat([a, b], dim=1)), b


def test_concat_shares_one_encoding_and_a_tapped_producer_keeps_its_own():
    quant_plan = plan_of(Concats(), torch.randn(3, 4))
    assert leaders(quant_plan) == {"a:out": "concat:out", "concat:in[1]": "concat:out"}
    assert by_name(quant_plan)["b:out"].leader is None


def test_concat_of_a_value_with_itself_shares_once():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x):
            y = self.a(x)
            return torch.cat([y, y], dim=1)

    assert leaders(plan_of(Net(), torch.randn(3, 4), CODES)) == {"a:out": "concat:out"}


def test_chained_concats_end_at_one_leader():
    class Net(nn.Module):
        def forward(self, x, y, z):
            return torch.cat([torch.cat([x, y], 1), z], 1)

    quant_plan = plan_of(Net(), (torch.randn(2, 3), torch.randn(2, 3), torch.randn(2, 3)), CODES)
    assert set(leaders(quant_plan).values()) == {"concat_1:out"}
    assert set(leaders(quant_plan)) == {"x:input", "y:input", "z:input", "concat:out"}


def test_split_pieces_share_their_source_and_merge_on_edges():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), nn.Linear(4, 4)

        def forward(self, x):
            left, right = self.a(x).chunk(2, dim=1)
            return torch.cat([left, self.b(right)], dim=1)

    quant_plan = plan_of(Net(), torch.randn(3, 4), CODES)
    assert leaders(quant_plan) == {"concat:in[0]": "concat:out", "b:out": "concat:out"}
    assert by_name(quant_plan)["a:out"].leader is None


class Beside(nn.Module):
    """``code(a, b)`` of two layers' results, and what reads it."""

    def __init__(self, code, head=None):
        super().__init__()
        self.a, self.b, self.code, self.head = nn.Linear(4, 4), nn.Linear(4, 4), code, head or nn.Identity()

    def forward(self, x):
        return self.head(self.code(self.a(x), self.b(x)))


MERGES = {
    "concat": lambda a, b: torch.cat([a, b], 1), "stack": lambda a, b: torch.stack([a, b], 1),
    "where": lambda a, b: torch.where(a > b, a, b),
    "slice_scatter": lambda a, b: torch.slice_scatter(a, b[:, :2], 1, 0, 2),
    "index_add": lambda a, b: a.index_add(1, torch.tensor([0, 1, 2, 3]), b),
}


@pytest.mark.medium
@pytest.mark.parametrize("name", ["concat", "stack", "where", "slice_scatter", "index_add"])
def test_what_is_merged_for_outputs_alone_keeps_its_own_ranges(name):
    quant_plan = plan_of(Beside(MERGES[name]), torch.randn(3, 4))
    assert not leaders(quant_plan)
    assert by_name(quant_plan).keys() >= {"a:out", "b:out"}
    (reason,) = [reason for site, reason in quant_plan.unquantized.items() if "keeps its own ranges" in reason]
    assert reason


@pytest.mark.medium
@pytest.mark.parametrize(("name", "head", "shared"), [
    ("concat", nn.Linear(8, 2), True), ("concat", nn.ReLU(), True), ("slice_scatter", nn.Linear(4, 2), True),
    ("slice_scatter", nn.ReLU(), False), ("where", nn.Sigmoid(), False),
])
def test_layers_read_merged_codes_and_so_do_ops_where_there_are_kernels(name, head, shared):
    assert bool(leaders(plan_of(Beside(MERGES[name], head), torch.randn(3, 4)))) == shared


def test_a_rule_that_asks_for_codes_gets_them():
    assert leaders(plan_of(Beside(MERGES["concat"]), torch.randn(3, 4), CODES)) == {
        "a:out": "concat:out", "b:out": "concat:out"}


def test_padding_with_a_number_beside_small_values_stays_float():
    class Padded(nn.Module):
        def __init__(self):
            super().__init__()
            self.b = nn.Linear(4, 4)

        def forward(self, x):
            return nn.functional.pad(self.b(x), (1, 1), value=500.0)

    assert by_name(plan_of(Padded(), torch.randn(3, 4))).keys() == {"x:input", "b.weight", "b:out"}


PER_HEAD = {**BARE, "rules": [
    {"match": {"op": "concat"}, "output": {"bits": 8, "granularity": "per_channel", "axis": 1}}]}


class Heads(nn.Module):
    def __init__(self, along=2):
        super().__init__()
        self.key, self.along = nn.Linear(6, 6), along

    def forward(self, x, past):
        past = torch.cat([past, self.key(x).view(2, 3, 2, 3).transpose(1, 2)], self.along)
        return past @ past.transpose(2, 3)


def test_scales_of_an_axis_are_shared_where_that_axis_is():
    """The key is [batch, length, heads * width] where it is computed: its axis 1 has no scales."""
    quant_plan = plan_of(Heads(), (torch.randn(2, 3, 6), torch.randn(2, 2, 5, 3)), PER_HEAD)
    assert leaders(quant_plan) == {"past:input": "concat:out", "concat:in[1]": "concat:out"}
    assert {str(each.spec) for name, each in by_name(quant_plan).items() if "weight" not in name and name != "x:input"
            and not name.startswith("matmul")} == {"uint8 per_channel(axis=1) asymmetric"}
    reasons = {site.name: reason for site, reason in quant_plan.unquantized.items()}
    assert reasons["key:out"] == "rounded where concat:out merges it, with scales of an axis"


def test_what_is_joined_along_the_axis_of_the_scales_shares_nothing():
    quant_plan = plan_of(Heads(1), (torch.randn(2, 3, 6), torch.randn(2, 2, 3, 3)), PER_HEAD)
    assert leaders(quant_plan) == {}


@pytest.mark.medium
def test_a_value_whose_length_alone_is_read_elsewhere_shares_at_its_producer():
    class Grows(nn.Module):
        def forward(self, x, past):
            return torch.cat([past, x], 1) @ torch.arange(3.0)[:, None] + past.shape[1]

    model = qtk.prepare_model(Grows(), (torch.randn(2, 4, 3), torch.randn(2, 5, 3)), dynamic_shapes="all")
    quant_plan = qtk.QuantSim(model, (torch.randn(2, 4, 3), torch.randn(2, 5, 3)), config=CODES).plan
    assert leaders(quant_plan) == {"x:input": "concat:out", "past:input": "concat:out"}


@pytest.mark.medium
@pytest.mark.parametrize(("axis", "error"), [
    (2, r"concat:out: axis 2 of \[.*\] has no fixed length"),
    (4, r"concat:out: axis 4 does not exist in a tensor of rank 4"),
])
def test_an_axis_without_a_scale_for_each_index_is_refused_with_its_site(axis, error):
    rule = {"match": {"op": "concat"}, "output": {"bits": 8, "granularity": "per_channel", "axis": axis}}
    inputs = torch.randn(2, 3, 6), torch.randn(2, 2, 5, 3)
    model = qtk.prepare_model(Heads(), inputs, dynamic_shapes="all")
    with pytest.raises(SpecError, match=error):
        qtk.QuantSim(model, inputs, config={**BARE, "rules": [rule]})
