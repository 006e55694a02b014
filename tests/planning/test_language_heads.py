"""Heads of language models, found by what they do."""

import warnings

import pytest
import torch
from torch import nn

import qtk
from qtk.graph.flow import Flow
from qtk.graph.sites import value_site
from qtk.planning.language_heads import language_heads, vocabularies


class Decoder(nn.Module):
    """Words, positions, a layer, a head; what ``ends`` says is computed of the logits."""

    def __init__(self, ends=lambda logits: logits, words=50, outputs=50, positions=16):
        super().__init__()
        self.words, self.positions = nn.Embedding(words, 16), nn.Embedding(positions, 16)
        self.up, self.down, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, outputs)
        self.ends = ends

    def forward(self, ids):
        x = self.words(ids) + self.positions(torch.arange(ids.shape[1]))
        return self.ends(self.head(x + self.down(self.up(x).relu())))


IDS = torch.zeros(2, 9, dtype=torch.long)
FORMS = {
    "plain": (Decoder(), {"head"}),
    "soft cap": (Decoder(lambda logits: (logits / 30).tanh() * 30), {"head"}),
    "last token": (Decoder(lambda logits: logits[:, -1]), {"head"}),
    "other words": (Decoder(outputs=20), set()),
    "as many positions": (Decoder(outputs=20, positions=20), set()),
    "inside": (nn.Sequential(Decoder(), nn.Linear(50, 3)), set()),
    "tied": (Decoder(), {"head"}),
}
FORMS["tied"][0].head.weight = FORMS["tied"][0].words.weight


@pytest.mark.medium
@pytest.mark.sample(2)
@pytest.mark.parametrize("name", FORMS)
def test_a_head_has_an_output_for_each_word(name):
    model, expected = FORMS[name]
    graph = qtk.prepare_model(model.eval(), IDS, verify=False).graph
    found = language_heads(graph, Flow(graph), vocabularies([graph]))
    assert {value_site(node).name.partition(":")[0].rpartition(".")[2] for node in found} == expected


class Changed(nn.Module):
    """Ids that ``change`` alters, a layer, a head."""

    def __init__(self, change):
        super().__init__()
        self.words, self.up, self.head, self.change = nn.Embedding(50, 16), nn.Linear(16, 16), nn.Linear(16, 50), change
        self.register_buffer("table", torch.arange(50))

    def forward(self, ids):
        return self.head(self.up(self.words(self.change(self, ids))).relu())


GIVEN = {
    "clamp": lambda m, ids: ids.clamp(min=0), "where": lambda m, ids: torch.where(ids == 3, 0, ids),
    "zeros": lambda m, ids: torch.where(ids == 3, torch.zeros_like(ids), ids),
    "product": lambda m, ids: ids * (ids != 3),
    "several": lambda m, ids: ((ids + 1) * 2 % 50 // 2).abs().long(),
    "fill": lambda m, ids: ids.masked_fill(ids < 0, 0),
    "shifted": lambda m, ids: torch.cat([torch.zeros_like(ids[:, :1]), ids[:, :-1]], 1),
    "offset": lambda m, ids: ids + m.table[:1],
}
NOT_GIVEN = {
    "counted": lambda m, ids: ids.ne(1).int().cumsum(1), "of a mask": lambda m, ids: ids.cumsum(1) * ids,
    "positions": lambda m, ids: torch.arange(9) + ids[0, 0], "buffer": lambda m, ids: m.table[:9] + ids[0, 0],
}


@pytest.mark.sample(6)
@pytest.mark.medium
@pytest.mark.parametrize("name", [*GIVEN, *NOT_GIVEN])
def test_ids_are_followed_through_what_changes_them_one_by_one(name):
    graph = qtk.prepare_model(Changed((GIVEN | NOT_GIVEN)[name]).eval(), IDS, verify=False).graph
    assert vocabularies([graph]) == ({50} if name in GIVEN else frozenset())


class Tied(nn.Module):
    """A decoder that takes embeddings in place of ids."""

    def __init__(self):
        super().__init__()
        self.words, self.up, self.head = nn.Embedding(64, 16), nn.Linear(16, 16), nn.Linear(16, 64, bias=False)
        self.head.weight = self.words.weight

    def forward(self, inputs_embeds):
        return self.head(self.up(inputs_embeds).relu())


@pytest.mark.medium
def test_a_head_that_is_not_found_is_warned_of():
    rules = [{"match": {"lm_head": True}, "weight": "float", "optional": True}]
    config = {"version": 1, "defaults": {"activation": "float"}, "rules": rules}
    selected = Changed(lambda module, ids: module.table[ids])
    for model, x, path in ((selected, IDS, "head"), (Tied(), torch.randn(2, 9, 16), "head")):
        with pytest.warns(UserWarning, match=rf"lm_head.* none was found: {path} computes .*match: {{path: 'head'}}"):
            qtk.QuantSim(model.eval(), x, config=config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = qtk.QuantSim(Changed(GIVEN["clamp"]).eval(), IDS, config=config)
        qtk.QuantSim(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)).eval(), torch.randn(2, 16),
                     config=config)
        remedy = {"match": {"path": "head"}, "weight": "float"}
        assert "head.weight" not in qtk.QuantSim(selected.eval(), IDS, config={
            **config, "rules": [*rules, remedy]}).quantizers
        hidden = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        qtk.QuantSim(hidden.eval(), IDS, config=config)  # a model without a head
    assert "head.weight" not in found.quantizers


@pytest.mark.medium
def test_shipped_targets_leave_it_in_float():
    model = qtk.prepare_model(Decoder(words=64, outputs=64).eval(), IDS)
    for config in ("vllm_w8a8", "dynamic_per_token"):
        sim = qtk.QuantSim(model, IDS, config=config)
        assert {"up.weight", "down.weight"} <= set(sim.quantizers)
        assert not any(name.startswith("head") for name in sim.quantizers)
    rule = {"match": {"lm_head": True}, "weight": {"bits": 4}}
    quantizers = qtk.QuantSim(model, IDS, config={"version": 1, "rules": [rule]}).quantizers
    assert (quantizers["head.weight"].spec.dtype.bits, quantizers["up.weight"].spec.dtype.bits) == (4, 8)
