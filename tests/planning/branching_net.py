"""A net of branches, some of which are excluded, and its simulation."""

import torch
import torch.nn.functional as F
from torch import nn

import qtk
from tests.planning.plans import BARE

X = torch.randn(4, 8)


class Net(nn.Module):
    """``branches`` computes the outputs from the net and the output of its ReLU."""

    def __init__(self, branches):
        super().__init__()
        self.stem, self.left, self.right, self.third = (nn.Linear(8, 8) for _ in range(4))
        self.branches = branches

    def forward(self, x):
        y = F.relu(self.stem(x))
        return self.branches(self, y)


def sim(branches, exclude=("left",), **settings):
    made = qtk.QuantSim(Net(branches).eval(), X, config={**BARE, "exclude": list(exclude), **settings})
    made.compute_encodings([X], progress=False)
    return made


def sites(made):
    return {site.name for site in made.plan}


def reasons(made):
    return {site.name: reason for site, reason in made.plan.unquantized.items()}
