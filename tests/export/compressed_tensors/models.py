"""Small models, and simulations whose config is written out."""

import torch
from torch import nn

import qtk

X = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
BLOCKS = {"granularity": "per_block", "block_size": 32}
LAYERS = {"op": ["linear", "addmm", "grouped_matmul"]}
PER_TOKEN = {"dtype": "int8", "symmetric": True, "granularity": "per_token", "narrow_range": True}
STATIC = {"dtype": "int8", "symmetric": True, "granularity": "per_tensor"}


class Two(nn.Module):
    """Rows of 64 and of 37, which no word divides; a norm between."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 37)

    def forward(self, x):
        return self.last(self.norm(self.first(x)).relu())


class Transposed(nn.Module):
    """A weight [in, out], as the Conv1D of transformers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Module()
        self.inner.weight, self.inner.bias = nn.Parameter(torch.randn(64, 24)), nn.Parameter(torch.zeros(24))

    def forward(self, x):
        return torch.addmm(self.inner.bias, x, self.inner.weight)


class Siblings(nn.Module):
    """Queries and keys of one value."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        self.k.weight.data *= 3

    def forward(self, x):
        return self.q(x) * self.k(x)


def simulated(model, weight, rules=(), x=X, inputs=None):
    given = [{"match": {"path": "*"}, "output": "float", "optional": True},
             {"match": LAYERS, "input": "quantized", "optional": True}] if inputs else []
    config = {"version": 1, "defaults": {"weight": weight, "activation": inputs or "float"}, "rules": [
        *given, {"match": {"op": "layer_norm"}, "weight": "float", "optional": True}, *rules],
        "io": {"inputs": "float", "outputs": "float"}}
    sim = qtk.QuantSim(model.eval(), x, config=config)
    sim.compute_encodings([x], progress=False)
    return sim
