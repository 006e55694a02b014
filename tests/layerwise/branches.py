"""Models with the simulation, calls and layers that a walk runs on."""

import torch
import torch.nn.functional as F
from torch import nn

import qtk
from qtk.calls.calls import Call
from qtk.layerwise.weighted_layers import weighted_layers
from qtk.moments.required_statistics import RequiredStatistics

EXACT = RequiredStatistics(dtype=torch.float64)


class Branches(nn.Module):
    """One value for three layers, a residual, convolutions of several kinds; a layer used twice, if need be."""

    def __init__(self, *, twice=False):
        super().__init__()
        self.twice = twice
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.depthwise = nn.Conv2d(4, 4, 3, stride=2, groups=4)
        self.up = nn.ConvTranspose2d(4, 4, 2, stride=2)
        self.q, self.k, self.v = (nn.Linear(4, 4) for _ in range(3))
        self.mlp = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3, bias=False)

    def forward(self, x):
        x = self.up(F.relu(self.depthwise(F.relu(self.stem(x)))))
        x = x.flatten(2).transpose(1, 2)
        weights = torch.softmax(self.q(x) @ self.k(x).transpose(1, 2), -1)
        x = x + weights @ self.v(x)
        x = F.gelu(self.mlp(x))
        return self.head((self.mlp(x) if self.twice else x).mean(1))


def prepared(model=None, batches=None, **settings):
    torch.manual_seed(0)
    batches = batches or [torch.randn(3, 2, 8, 8) for _ in range(3)]
    sim = qtk.QuantSim(model or Branches().eval(), batches[0], weight_bits=4, **settings)
    sim.compute_encodings(batches, progress=False)
    layers, _ = weighted_layers(sim.model, sim.plan)
    return sim, batches, [Call((batch,), {}, None) for batch in batches], layers
