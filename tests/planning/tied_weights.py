"""Nets in which several ops read one weight, each in its way, and their simulations."""

import torch
import torch.nn.functional as F
from torch import nn

import qtk


class Tied(nn.Module):
    """``left`` reads its weight [out, in], and so do other ops in ways of their own."""

    def __init__(self, others):
        super().__init__()
        self.left, self.others = nn.Linear(8, 6, bias=False), others

    def forward(self, x):
        return self.left(x), *self.others(self.left.weight, x)


def tied(others, *, exclude=("left",), rules=(), **weight):
    config = {"version": 1, "defaults": {"weight": weight}, "exclude": list(exclude), "rules": list(rules)}
    return qtk.QuantSim(Tied(others).eval(), torch.randn(4, 8), config=config)


def two_axes(weight, x):
    return (F.linear(x[:, :6], weight.t()),)
