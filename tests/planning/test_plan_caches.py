"""Where keys and values are quantized, and that a cache has one encoding with them."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qtk
from qtk.config.load import load_config
from qtk.core.width import FROM_CONFIG
from qtk.errors import ConfigError, SpecError
from qtk.planning.plan_caches import KEY
from qtk.planning.planner import plan
from tests.planning.plans import by_name

ALONE = {"version": 1, "rules": [{"match": {"path": "*"}, "output": "float", "optional": True}]}
X = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0))


def config(granularity="per_tensor", dtype="int8", **base):
    return {**(base or ALONE), KEY: {"dtype": dtype, "granularity": granularity}}


def repeated(x, count):
    return x[:, :, None].expand(-1, -1, count, -1, -1).reshape(x.shape[0], -1, *x.shape[2:])


class Grouped(nn.Module):
    """Four heads of queries and two of keys, repeated as models of transformers do; a cache where one is given."""

    def __init__(self, fused=False):
        super().__init__()
        torch.manual_seed(0)
        self.fused = fused
        self.q, self.k, self.v = nn.Linear(16, 32), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x, past=None):
        q, k, v = (layer(x).unflatten(-1, (-1, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        k = k * torch.arange(1.0, 9.0) - 0.5  # as a rotary embedding, no movement
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        keys, values = repeated(k, 2), repeated(v, 2)
        mask = torch.arange(k.shape[2]) <= k.shape[2] - x.shape[1] + torch.arange(x.shape[1])[:, None]
        if self.fused:
            return F.scaled_dot_product_attention(q, keys, values, mask), (k, v)
        return (q @ keys.mT / 8**0.5).masked_fill(~mask, -1e9).softmax(-1) @ values, (k, v)


class Fused(nn.Module):
    """Queries, keys and values of one product; one head of keys for two of queries."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 32)

    def forward(self, x):
        q, k, v = self.qkv(x).split((16, 8, 8), -1)
        return (q.unflatten(-1, (2, 8)).transpose(1, 2) @ k[:, None].mT).softmax(-1) @ v[:, None]


class Unbroken(nn.Module):
    """Heads are counted by the axis of the batch alone."""

    def __init__(self):
        super().__init__()
        self.k = nn.Linear(16, 16)

    def forward(self, x):
        k = self.k(x).transpose(0, 1).reshape(6, 4, 8).transpose(0, 1)
        return (k @ k.mT).softmax(-1) @ k


class Scaled(nn.Module):
    """Heads share the axis of the batch, where keys and values are multiplied with a number."""

    def __init__(self):
        super().__init__()
        self.k = nn.Linear(16, 16)

    def forward(self, x):
        k = self.k(x).unflatten(-1, (2, 8)).transpose(1, 2).flatten(0, 1) * 0.5
        return (k @ k.mT).softmax(-1) @ (k + 1)


PREPARED = functools.cache(lambda kind: qtk.prepare_model(kind().eval(), X))


def planned(config, kind=Grouped):
    return plan(PREPARED(kind), load_config(config), weight_bits=None, activation_bits=FROM_CONFIG, scheme="min_max")


def of_caches(quant_plan):
    return {name: decided for name, decided in by_name(quant_plan).items() if KEY in decided.reason}


def test_the_sites_are_in_front_of_the_repeat_and_alone():
    quant_plan = planned(config("per_head"))
    assert {name: str(decided.spec) for name, decided in by_name(quant_plan).items()} == dict.fromkeys(
        ["sub:out", "transpose_2:out"], "int8 per_channel(axis=1) symmetric")
    all_of_it = planned(config("per_head", version=1))
    assert {name: by_name(all_of_it)[name].spec for name in by_name(quant_plan)} == {
        name: decided.spec for name, decided in by_name(quant_plan).items()}
    assert "rounded as keys or values" in all_of_it.unquantized[qtk.Site("v", "", "out")]  # once
    assert {"q:out", "k:out"} <= by_name(all_of_it).keys()  # k is multiplied first


@pytest.mark.medium
def test_pieces_of_one_product_and_one_head():
    found = of_caches(planned(config("per_token", "fp8_e4m3"), Fused))
    assert {str(decided.spec) for decided in found.values()} == {"fp8_e4m3 per_token symmetric dynamic"}
    assert "qkv:out" not in found
    found = of_caches(planned(config("per_head"), Fused))
    assert {decided.spec.granularity.qparam_shape((2, 1, 6, 8)) for decided in found.values()} == {(1,)}


class Learned(nn.Module):
    """Values that are parameters, which no cache holds, and keys that queries are too."""

    def __init__(self):
        super().__init__()
        self.k, self.values = nn.Linear(16, 8), nn.Parameter(torch.randn(2, 2, 6, 4))

    def forward(self, x):
        k = self.k(x).unflatten(-1, (2, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(k, k, self.values)


@pytest.mark.medium
def test_keys_that_are_queries_are_rounded_where_attention_reads_them():
    assert {name: str(decided.spec) for name, decided in of_caches(planned(config("per_head"), Learned)).items()} == {
        "attention:in[1]": "int8 per_channel(axis=1) symmetric"}


@pytest.mark.medium
def test_the_attention_of_torch_with_its_weights_has_a_scale_for_each_token():
    class SelfAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)  # heads on the axis of the batch

        def forward(self, x):
            return self.attention(x, x, x)[0]

    found = of_caches(planned(config("per_token"), SelfAttention))
    assert [str(decided.spec) for decided in found.values()] == ["int8 per_token symmetric narrow dynamic"] * 2


@pytest.mark.medium
def test_errors():
    with pytest.raises(SpecError, match=r"the axes of heads, tokens and width are not told apart; write kv_cache: "
                                        r"\{dtype: int8, granularity: per_tensor\}"):
        planned(config("per_head"), Unbroken)
    assert of_caches(planned(config(), Unbroken))
    with pytest.raises(SpecError, match="the axes of heads, tokens and width are not told apart"):
        planned(config("per_head"), Scaled)  # what is computed on the axis of batch and heads is of no single head
    with pytest.raises(ConfigError, match="kv_cache of the config quantizes keys and values of attention, and the "
                                          "graphs of this model have none"):
        planned(config(), lambda: nn.Sequential(nn.Linear(16, 16), nn.Softmax(-1)))


def rounded(x, scale):
    return (x / scale).round().clamp(-128, 127) * scale


def reference(model, x):
    """The model with keys and values rounded by hand, a scale for each head."""
    q, k, v = (layer(x).unflatten(-1, (-1, 8)).transpose(1, 2) for layer in (model.q, model.k, model.v))
    k = k * torch.arange(1.0, 9.0) - 0.5
    low, high = torch.tensor(128.0), torch.tensor(127.0)
    k, v = (rounded(each, torch.maximum(each.amax((0, 2, 3)) / high, -each.amin((0, 2, 3)) / low)[:, None, None])
            for each in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@pytest.mark.medium
@pytest.mark.parametrize(("granularity", "fused"), [
    ("per_head", False), pytest.param("per_head", True, marks=pytest.mark.slow),
    pytest.param("per_token", False, marks=pytest.mark.slow)])
def test_a_call_with_a_cache_computes_what_one_without_does(granularity, fused):
    model = Grouped(fused).eval()
    with torch.no_grad():
        past = tuple(each[:, :, :4] for each in model(X)[1])
    sim = qtk.QuantSim(model, (X,), variants=[(X[:, 4:], past)], dynamic_shapes=None, weight_bits=None,
                       config=config(granularity))
    sim.compute_encodings([(X,)], progress=False)
    with torch.no_grad():
        whole, cache = sim.model(X)
        last, after = sim.model(X[:, 4:], tuple(each[:, :, :4] for each in cache))
    for found, expected in ((after, cache), (last, whole[:, :, 4:])):
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=0)  # products of fewer rows round otherwise
    if granularity == "per_head":
        torch.testing.assert_close(whole, reference(model, X), atol=1e-6, rtol=0)
        leaders = {name: decided.leader for name, decided in of_caches(sim.plan).items() if decided.leader}
        assert {name: str(leader) for name, leader in leaders.items()} == {
            "past_0:input": "sub:out", "concat:out": "sub:out",
            "past_1:input": "transpose_2:out", "concat_1:out": "transpose_2:out"}
    else:
        assert of_caches(sim.plan).keys() == {"sub:out", "transpose_2:out"}


class Held(nn.Module):
    """A cache of a fixed length in buffers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(16, 48)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, 2, 9, 8))

    def forward(self, x, at):
        q, k, v = self.qkv(x).reshape(1, -1, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        self.keys, self.values = self.keys.index_copy(2, at, k), self.values.index_copy(2, at, v)
        return F.scaled_dot_product_attention(q, self.keys, self.values, torch.arange(9) <= at[:, None])


@pytest.mark.slow
def test_a_cache_in_buffers():
    sim = qtk.QuantSim(Held().eval(), (X[:1, :3], torch.arange(3)), config=config("per_head"))
    found = of_caches(sim.plan)
    leaders = {name: str(decided.leader or name) for name, decided in found.items()}
    assert leaders["getitem_1:out"] == leaders["keys:input"] != leaders["getitem_2:out"] == leaders["values:input"]
    sim.compute_encodings([(X[:1, at:at + 3], torch.arange(at, at + 3)) for at in (0, 3)], progress=False)
    before = [sim.model(X[:1, at:at + 3], torch.arange(at, at + 3)) for at in (0, 3)]
    assert before[0].isfinite().all()
    assert torch.equal(sim.model.keys[:, :, 6:], torch.zeros(1, 2, 3, 8))
