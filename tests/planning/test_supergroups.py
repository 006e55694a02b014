import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qtk
from qtk.graph.flow import Flow
from qtk.graph.sites import value_site
from qtk.planning.patterns import match_patterns
from qtk.planning.supergroups import match_supergroups
from qtk.workflow.prepare import prepare_model


def matches(model, inputs, *patterns):
    graph = prepare_model(model.eval(), inputs).graph
    found = match_supergroups(graph, Flow(graph), patterns, {})
    return [[value_site(node).name for node in group.nodes] for group in found]


@pytest.mark.medium
def test_the_longest_chain_is_taken_and_chains_are_disjoint():
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.ReLU(), nn.Sigmoid())
    found = matches(net, torch.randn(2, 3, 4, 4), ("conv", "relu"), ("conv", "relu", "sigmoid"), ("relu", "sigmoid"))
    assert found == [["0:out", "1:out"], ["2:out", "3:out", "4:out"]]


def test_a_finer_kind_matches_itself_alone():
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU())
    assert matches(net, torch.randn(2, 3, 4, 4), ("conv2d", "relu")) == [["0:out", "1:out"]]
    assert matches(net, torch.randn(2, 3, 4, 4), ("conv1d", "relu")) == []


@pytest.mark.medium
def test_alternatives_match_without_being_multiplied_out():
    relus = nn.Sequential(nn.Linear(4, 4), *(nn.ReLU() if index % 2 else nn.GELU() for index in range(40)))
    chain = ("linear", *[("gelu", "relu", "silu", "tanh")] * 40)
    assert matches(relus, torch.randn(2, 4), chain) == [["0:out", *(f"{index}:out" for index in range(1, 41))]]
    other = nn.Sequential(nn.Linear(4, 4), *(nn.ReLU() for _ in range(39)), nn.Sigmoid())
    assert matches(other, torch.randn(2, 4), chain) == []


def test_a_match_is_named_by_the_first_alternative_that_fits():
    graph = prepare_model(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()).eval(), torch.randn(2, 3, 4, 4)).graph
    (group,) = match_supergroups(graph, Flow(graph), [(("linear", "conv2d", "conv"), ("gelu", "relu"))], {})
    assert str(group) == "conv2d → relu"


class Reads(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.fc, self.how = nn.Linear(4, 4), how

    def forward(self, x):
        return self.how(self.fc(x))


@pytest.mark.medium
def test_an_inner_value_with_a_second_reader_breaks_the_chain():
    inputs, pattern = torch.randn(2, 4), ("linear", "relu")
    assert matches(Reads(lambda y: F.relu(y)), inputs, pattern)
    assert not matches(Reads(lambda y: F.relu(y) + y), inputs, pattern)
    assert not matches(Reads(lambda y: (F.relu(y), y)), inputs, pattern)


@pytest.mark.sample(2)
@pytest.mark.medium
@pytest.mark.parametrize("how", [
    lambda y: y.masked_fill((y.new_ones(4) > 1).expand_as(y), -1.0),
    lambda y: y.masked_fill((torch.ones(4, len(y)).T > 1).view_as(y), -1.0),
    lambda y: y.masked_fill(torch.zeros_like(y) > 1, -1.0),
    lambda y: y.masked_fill(torch.ones(y.size(0), 1) > 1, -1.0),
])
def test_a_reader_of_the_shape_alone_does_not_break_the_chain(how):
    assert matches(Reads(how), torch.randn(2, 4), ("linear", "masked_fill")) == [["fc:out", "masked_fill:out"]]
    assert not matches(Reads(lambda y: how(y) + y), torch.randn(2, 4), ("linear", "masked_fill"))


def test_the_chain_must_continue_through_a_data_input():
    """The condition of a where is no value."""
    net = Reads(lambda y: torch.where(y > 0, 1.0, y.detach() * 0).softmax(-1))
    assert not matches(net, torch.randn(2, 4), ("linear", "where"))


def test_data_movement_does_not_break_a_chain():
    net = Reads(lambda y: F.relu(y.reshape(-1, 2, 2).transpose(1, 2)))
    assert matches(net, torch.randn(2, 4), ("linear", "relu")) == [["fc:out", "relu:out"]]
    tapped = Reads(lambda y: (F.relu(y.reshape(-1, 2, 2)), y.reshape(-1)))
    assert not matches(tapped, torch.randn(2, 4), ("linear", "relu"))


def test_l2_normalize_is_one_op_and_never_divides_by_a_rounded_zero():
    net = Reads(lambda y: F.normalize(y, dim=-1)).eval()
    x = torch.randn(64, 4) * torch.logspace(-4, 2, 64)[:, None]  # norms that 8 bits cannot hold side by side
    with torch.no_grad():
        net.fc.bias.zero_()
    sim = qtk.QuantSim(net, x)
    sim.compute_encodings([x], progress=False)
    assert [name for name in sim.quantizers if name.endswith(":out")] == ["fc:out", "div:out"]
    with torch.no_grad():
        found = sim.model(x)
    assert bool(found.isfinite().all())
    assert float(found.abs().max()) <= 1.01


class ReshapedGelu(nn.Module):
    """A decomposed linear layer: its product is reshaped before a GELU of small ops reads it twice."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 8)), nn.Parameter(torch.randn(8))

    def forward(self, x):
        h = torch.addmm(self.bias, x.flatten(0, 1), self.weight).reshape(*x.shape[:2], 8)
        return h * 0.5 * (1 + torch.erf(h / 2**0.5))


def test_a_formula_is_found_behind_data_movement():
    graph = prepare_model(ReshapedGelu().eval(), torch.randn(2, 3, 4)).graph
    formulas = {node: match for match in match_patterns(graph) for node in match.nodes}
    (group,) = match_supergroups(graph, Flow(graph), [("addmm", "gelu")], formulas)
    assert [value_site(node).name for node in group.nodes] == ["addmm:out", "mul_1:out"]
