"""Formulas as people write them out: the name of the op they are, and a module of each spelling."""

import math

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 8


class Formula(nn.Module):
    """A function of x and of parameters w, b."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.w = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.b = nn.Parameter(torch.randn(WIDTH) / 5)
        self.register_buffer("constant", torch.tensor(0.5))

    def forward(self, x):
        return self.function(self, x)


def annotated_transformer(m, x):
    mean, std = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
    return m.w * (x - mean) / (std + 1e-6) + m.b


def moments_once(m, x):
    centered = x - x.mean(-1, keepdim=True)
    return m.b + m.w * (centered * torch.rsqrt((centered * centered).mean(-1, keepdim=True) + 1e-5))


def moments_twice(m, x):
    u = x.mean(-1, keepdim=True)
    s = (x - u).pow(2).mean(-1, keepdim=True)
    return m.w * ((x - u) / torch.sqrt(s + 1e-6)) + m.b


def channels_first(m, x):
    x = x.reshape(x.shape[0], WIDTH, -1, 1)
    u = x.mean(1, keepdim=True)
    s = (x - u).pow(2).mean(1, keepdim=True)
    x = (x - u) / torch.sqrt(s + 1e-6)
    return m.w[:, None, None] * x + m.b[:, None, None]


def torch_variance(m, x):
    return (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5)


def llama(m, x):
    dtype = x.dtype
    x = x.to(torch.float32)
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return m.w * x.to(dtype)


def gemma(m, x):
    return (x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-6)) * (1 + m.w)


def bert_gelu(m, x):
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def shared_half(m, x):
    gelu = lambda y: m.constant * y * (1.0 + torch.erf(y / 1.41421356))  # noqa: E731
    return gelu(gelu(x) + 1)


def gpt2_gelu(m, x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3))))


def cubed_gelu(m, x):
    return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x * x * x)))


def fast_gelu(m, x):
    return 0.5 * x * (1 + torch.tanh(x * 0.7978845608 * (1 + 0.044715 * x * x)))


def rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def rotary(m, x):
    angles = torch.arange(x.shape[0], device=x.device)[:, None] * m.w
    return x * torch.cos(angles) + rotate_half(x) * torch.sin(angles)


def rotary_by_chunks(m, x):
    a, b = x.chunk(2, -1)
    return x * m.w.cos() + torch.cat([-b, a], -1) * m.w.sin()


def squeeze_and_excite(m, x):
    return x * torch.sigmoid(F.linear(x, torch.diag(m.w), m.b))


SPELLINGS = [
    ("layer_norm", annotated_transformer), ("layer_norm", moments_once), ("layer_norm", moments_twice),
    ("layer_norm", channels_first), ("layer_norm", torch_variance),
    ("rms_norm", llama), ("rms_norm", gemma),
    ("rms_norm", lambda m, x: x * (torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * m.w)),
    ("rms_norm", lambda m, x: x * m.w * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)),
    ("gelu", bert_gelu), ("gelu", gpt2_gelu), ("gelu", cubed_gelu), ("gelu", fast_gelu),
    ("gelu", lambda m, x: x * torch.sigmoid(1.702 * x)),
    ("silu", lambda m, x: torch.sigmoid(x) * x), ("mish", lambda m, x: x * torch.tanh(F.softplus(x))),
    ("hardswish", lambda m, x: x * F.relu6(x + 3) / 6), ("hardswish", lambda m, x: x * F.hardsigmoid(x)),
    ("hardswish", lambda m, x: x * (torch.clamp(3 + x, 0, 6) / 6)),
    ("softmax", lambda m, x: softmax(x)),
    ("l2_normalize", lambda m, x: x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-8)),
    ("l2_normalize", lambda m, x: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True))),
    ("rotary", rotary), ("rotary", rotary_by_chunks), ("gate", squeeze_and_excite),
]


def softmax(x):
    e = torch.exp(x - x.max(-1, keepdim=True)[0])
    return e / e.sum(-1, keepdim=True)


def two_axes(m, x):
    y = x[:, None] + m.w[None, :, None]
    return (y - y.mean(-1, keepdim=True)) / torch.sqrt(y.var(1, keepdim=True, unbiased=False) + 1e-5)


def read_inside(m, x):
    s = torch.sigmoid(x)
    return x * s + s


NEAR_MISSES = [
    lambda m, x: 0.5 * x * (1 + torch.tanh(0.6 * (x + 0.044715 * torch.pow(x, 3)))),
    lambda m, x: 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * torch.pow(x, 2)))),
    lambda m, x: x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + 1e-6),
    lambda m, x: 0.25 * x * (1 + torch.erf(x / math.sqrt(2))),
    lambda m, x: x * F.relu6(x + 2) / 6,
    two_axes, read_inside,
]
"""What looks like a formula and is none."""
