"""Adapters of low rank, found by what they do, and left in float."""

import pytest
import torch
from torch import nn

import qtk
from qtk.graph.flow import Flow
from qtk.graph.sites import value_site
from qtk.planning.adapters import adapter_ops


class Adapted(nn.Module):
    """A linear layer with a bypass of rank 2."""

    def __init__(self, forward, rank=2, width=16):
        super().__init__()
        self.base, self.down = nn.Linear(width, width), nn.Linear(width, rank, bias=False)
        self.up, self.down_1 = nn.Linear(rank, width), nn.Linear(width, rank, bias=False)
        self.up_1 = nn.Linear(rank, width, bias=False)
        self.dropout, self.function = nn.Dropout(0.1), forward

    def forward(self, x):
        return self.function(self, x).relu()


class AdaptedConv(nn.Module):
    def __init__(self):
        super().__init__()
        self.base, self.down, self.up = nn.Conv2d(8, 8, 3), nn.Conv2d(8, 2, 3, bias=False), nn.Conv2d(2, 8, 1)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x)) * 0.5


FORMS = {  # name: function, sites of the adapter's ops
    "plain": (lambda net, x: net.base(x) + net.up(net.down(x)), {"down", "up"}),
    "scaled": (lambda net, x: net.base(x) + net.up(net.down(x)) * 0.5, {"down", "up", "mul"}),
    "first": (lambda net, x: net.up(net.down(net.dropout(x)) / 2) + net.base(x), {"down", "up", "div"}),
    "two": (lambda net, x: net.base(x) + net.up(net.down(x)) * 2 + net.up_1(net.down_1(x)),
            {"down", "up", "mul", "down_1", "up_1"}),
    "a function between": (lambda net, x: net.base(x) + net.up(net.down(x).relu()), set()),
    "of another input": (lambda net, x: net.base(x) + net.up(net.down(x.relu())), set()),
    "beside no product": (lambda net, x: x + net.up(net.down(x)), set()),
}


def found(model, x):
    graph = qtk.prepare_model(model.eval(), x, verify=False).graph
    return {value_site(node).name.partition(":")[0] for node in adapter_ops(graph, Flow(graph))}


@pytest.mark.medium
@pytest.mark.sample(3)
@pytest.mark.parametrize("name", FORMS)
def test_a_bypass_of_low_rank_is_an_adapter(name):
    function, expected = FORMS[name]
    assert found(Adapted(function), torch.randn(4, 16)) == expected


@pytest.mark.medium
def test_one_of_as_many_weights_as_its_layer_is_none_and_convolutions_have_them_too():
    assert found(Adapted(FORMS["plain"][0], rank=8), torch.randn(4, 16)) == set()
    assert found(AdaptedConv(), torch.randn(2, 8, 5, 5)) == {"down", "up", "mul"}


@pytest.mark.medium
@pytest.mark.parametrize("config", ["weight_only_int4", "onnxruntime", "qnn_htp_lpbq"])
def test_targets_leave_adapters_precise_and_later_rules_win(config):
    x, model = torch.randn(4, 64), Adapted(FORMS["scaled"][0], width=64).eval()
    names = {site.name: str(decided.spec) for site, decided in qtk.QuantSim(model, x, config=config).plan.items()}
    own = {"version": 1, "extends": config, "rules": [
        {"match": {"path": "down"}, "weight": {"dtype": "int8", "granularity": "per_channel"}}]}
    assert "base.weight" in names
    assert "down.weight" in {site.name for site in qtk.QuantSim(model, x, config=own).plan}
    if "qnn" in config:
        assert (names["down.weight"][:4], names["up:out"][:6]) == ("int8", "uint16")
        assert not names["base.weight"].startswith("int8")
    else:
        assert not names.keys() & {"down.weight", "up.weight", "down:out", "up:out", "mul:out"}
