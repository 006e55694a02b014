"""Heads of language models, found by what they do."""

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
