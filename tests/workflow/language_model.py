"""A small language model, and batches of tokens for it."""

import torch
from torch import nn


class LanguageModel(nn.Module):
    """Takes a mask, which it does not need, as decoders do."""

    def __init__(self, vocabulary=23, width=16):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mix = nn.Embedding(vocabulary, width), nn.Linear(width, width)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, input_ids, attention_mask=None):
        return {"logits": 4 * self.head(self.norm(self.mix(self.embed(input_ids)).tanh()))}


def token_batch(seed, samples=3, tokens=9):
    """Samples with padding at either end."""
    ids = torch.randint(0, 23, (samples, tokens), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[0, 6:], mask[1, :2] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def simulation(weight_bits=3, x=None):
    import qtk

    config = {"version": 1, "defaults": {"activation": "float"}, "rules": [
        {"match": {"op": "linear"}, "weight": {"bits": weight_bits}},
        {"match": {"op": ["embedding", "layer_norm"]}, "weight": "float", "optional": True}]}
    sim = qtk.QuantSim(LanguageModel().eval(), token_batch(0) if x is None else x, config=config)
    sim.compute_encodings(None, progress=False)
    return sim
