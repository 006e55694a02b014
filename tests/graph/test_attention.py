"""Which ops of a graph are attention, and what they read as keys and values."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qtk
from qtk.graph.attention import attentions, cache_quantizers, is_assembled
from qtk.graph.flow import Flow

Q, K, V = (torch.randn(2, 4, 5, 8) for _ in range(3))


def capped(q, k, v):
    scores = torch.tanh(q @ k.transpose(2, 3) / 5) * 5
    return scores.masked_fill(torch.ones(5, 5).triu(1) > 0, -1e9).softmax(-1) @ v


def with_sinks(q, k, v):
    scores = torch.cat([q @ k.mT, q.new_ones(2, 4, 5, 1)], -1)
    return (scores - scores.amax(-1, keepdim=True)).softmax(-1)[..., :-1] @ v


def positions(q):
    """What is the same for all data, though computed by the graph."""
    return torch.sin(q.new_ones(5, 8).cumsum(0) * torch.arange(1.0, 9.0))


FORMS = {
    "fused": (F.scaled_dot_product_attention, (-2, -1, -2, -1)),
    "small ops": (lambda q, k, v: F.dropout((q @ k.mT * 0.3).softmax(-1)) @ v, (-1, -2, -2, -1)),
    "soft cap and mask": (capped, (-1, -2, -2, -1)),
    "sinks": (with_sinks, (-1, -2, -2, -1)),
    "keys on the left": (lambda q, k, v: (k @ q.mT).softmax(-2).mT @ v, (-2, -1, -2, -1)),
    "values on the left": (lambda q, k, v: (v.mT @ (k @ q.mT).softmax(-2)).mT, (-2, -1, -1, -2)),
    "flat batches": (lambda q, k, v: torch.bmm(torch.baddbmm(
        torch.ones(1, 1, 5), q.flatten(0, 1), k.flatten(0, 1).mT).softmax(-1), v.flatten(0, 1)), (-1, -2, -2, -1)),
    "einsum": (lambda q, k, v: torch.einsum(
        "bhqk,bkhd->bqhd", torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1), v), (-3, -1, -3, -1)),
    "einsum of three": (lambda q, k, v: torch.einsum(
        "d,bhqd,bhkd->bhqk", q.new_ones(8), q, k).softmax(-1) @ v, (-2, -1, -2, -1)),
    "einsum without a result": (lambda q, k, v: torch.einsum(
        "...ij,...jk", torch.einsum("...ij,...kj", q, k).softmax(-1), v), (-2, -1, -2, -1)),
    "linear": (lambda q, k, v: F.linear(q[0, 0], k[0, 0]).softmax(-1) @ v[0, 0], (-2, -1, -2, -1)),
    "positions first": (lambda q, k, v: (q @ positions(q).mT + q @ k.mT).softmax(-1) @ v, (-1, -2, -2, -1)),
    "a scaled weight": (lambda q, k, v: ((q @ k.mT).softmax(-1) * 0.5) @ v, (-1, -2, -2, -1)),
}


OTHERS = {
    "pooling": lambda q, k, v: q.mean(-1).softmax(-1)[..., None, :] @ v,  # no product in front
    "linear attention": lambda q, k, v: q.softmax(-1) @ (k.softmax(-2).mT @ v),
    "no softmax": lambda q, k, v: torch.relu(q @ k.mT) @ v,
    "no second product": lambda q, k, v: (q @ k.mT).softmax(-1) * v.sum(),
}


class All(nn.Module):
    """All of some codes in one graph."""

    def __init__(self, codes):
        super().__init__()
        self.codes = codes

    def forward(self, q, k, v):
        return [code(q, k, v) for code in self.codes]


def found_in(codes):
    graph = qtk.prepare_model(All(codes).eval(), (Q, K, V), dynamic_shapes=None).graph
    flow = Flow(graph)
    return flow, list(attentions(graph, flow))


def test_keys_and_values_in_every_form():
    flow, found = found_in([code for code, _ in FORMS.values()])
    assert len(found) == len(FORMS)
    for name, each in zip(FORMS, found, strict=True):
        assert [flow.root(operand.port.value).name for operand in (each.keys, each.values)] == ["k", "v"], name
        axes = each.keys.tokens, each.keys.width, each.values.tokens, each.values.width
        assert axes == FORMS[name][1], name


@pytest.mark.medium
def test_what_is_none():
    assert found_in(list(OTHERS.values()))[1] == []


@pytest.mark.medium
def test_quantizers_of_keys_behind_a_merge():
    class Cached(nn.Module):
        def forward(self, q, k, v, past):
            return (q @ torch.cat([past, k], 2).mT).softmax(-1) @ torch.cat([past, v], 2)

    sim = qtk.QuantSim(Cached().eval(), (Q, K, V, torch.randn(2, 4, 3, 8)))
    graph = sim.model.graph
    flow = Flow(graph)
    (found,) = attentions(graph, flow)
    sites = [[each.site for each in cache_quantizers(flow, operand)] for operand in (found.keys, found.values)]
    assert all(len(each) == len(set(each)) and each for each in sites)
    assert sites[0] != sites[1]


@pytest.mark.medium
@pytest.mark.parametrize("shared", [True, False])
def test_keys_of_several_layers_are_assembled_and_partly_rotated_ones_are_not(shared):
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.other = nn.Linear(8, 24), nn.Linear(8, 4)

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            rotated = self.other(x) if shared else k[..., :4] * x.cos()[..., :4]
            return F.scaled_dot_product_attention(q, torch.cat([rotated, k[..., 4:]], -1), v)

    graph = qtk.prepare_model(Head().eval(), torch.randn(2, 5, 8), dynamic_shapes=None).graph
    (found,) = attentions(graph, flow := Flow(graph))
    assert (is_assembled(flow, found.keys), is_assembled(flow, found.values)) == (shared, False)
