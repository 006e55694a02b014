"""Small nets, each with one thing in it that decides whether channels may be scaled."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Net(nn.Module):
    """A net of one formula, ``forward``, over the modules it is given."""

    def __init__(self, forward, **members):
        super().__init__()
        self._formula = forward
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, *args):
        return self._formula(self, *args)


def net(formula, **members) -> nn.Module:
    """``Net`` with every parameter random and none near 0, norms with an epsilon that counts."""
    model = Net(formula, **members)
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        parameter.data = 0.6 * (drawn + 0.5 * drawn.sign())
    return model


def linear(into, out, bias=True):
    return nn.Linear(into, out, bias=bias)


def norm(width):
    return nn.LayerNorm(width, eps=0.1)


class Attention(nn.Module):
    """Attention with as few heads of keys and values as wanted; ``spelled``: in matmuls."""

    def __init__(self, width=4, heads=2, kv_heads=2, size=2, spelled=False):
        super().__init__()
        self.heads, self.kv_heads, self.size, self.spelled = heads, kv_heads, size, spelled
        self.q, self.k = linear(width, heads * size, False), linear(width, kv_heads * size, False)
        self.v, self.o = linear(width, kv_heads * size), linear(heads * size, width)

    def forward(self, x):
        q = self.q(x).unflatten(-1, (self.heads, self.size)).transpose(1, 2)
        k, v = (layer(x).unflatten(-1, (self.kv_heads, self.size)).transpose(1, 2) for layer in (self.k, self.v))
        if not self.spelled:
            y = F.scaled_dot_product_attention(q, k, v, enable_gqa=self.heads != self.kv_heads)
        else:
            k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (k, v))
            y = ((q @ k.transpose(-2, -1)) / math.sqrt(self.size)).softmax(-1) @ v
        return self.o(y.transpose(1, 2).flatten(2))


class SpelledGelu(nn.Module):
    """GELU in small ops, its 0.5 a buffer that other blocks read too."""

    def __init__(self, half: Tensor):
        super().__init__()
        self.register_buffer("factor", half)

    def forward(self, x):
        return x * self.factor * (1 + torch.erf(x / math.sqrt(2)))


def batch(*shape: int) -> Tensor:
    return torch.randn(64, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def randomized(model: nn.Module) -> nn.Module:
    """No parameter 0 (an initial layer scale or head may be), statistics of batch norm off their defaults."""
    for parameter in model.parameters():
        if not bool(parameter.any()):
            parameter.data = torch.randn_like(parameter) * 0.1
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_()
        elif name.endswith("running_var"):
            buffer.uniform_(0.5, 2.0)
    return model
