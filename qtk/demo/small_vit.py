"""A small vision transformer whose attention is written as separate linear, matmul and softmax ops."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qtk.demo.digits import CLASSES, SIDE

PATCH = 2
TOKENS = (SIDE // PATCH) ** 2


class Attention(nn.Module):
    """Multi-head self-attention. Shape: [N, T, C], kept."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.scale = (width // heads) ** -0.5
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x_NTC: Tensor) -> Tensor:
        batch, tokens, width = x_NTC.shape
        qkv = self.qkv(x_NTC).reshape(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [N, heads, T, C / heads]
        weights = ((q * self.scale) @ k.transpose(-2, -1)).softmax(-1)
        mixed: Tensor = self.proj((weights @ v).transpose(1, 2).reshape(batch, tokens, width))
        return mixed


class Block(nn.Module):
    """Pre-norm transformer block: attention, then a two-layer perceptron. Shape: [N, T, C], kept."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x_NTC: Tensor) -> Tensor:
        x_NTC = x_NTC + self.dropout(self.attn(self.norm1(x_NTC)))
        out: Tensor = x_NTC + self.dropout(self.mlp(self.norm2(x_NTC)))
        return out


class SmallViT(nn.Module):
    """58 thousand parameters, 16 tokens of 2×2 pixels. Shape: digits [N, 1, 8, 8] to scores [N, 10]."""

    def __init__(self, width: int = 48, depth: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, width, PATCH, stride=PATCH)
        self.position = nn.Parameter(torch.zeros(1, TOKENS, width))
        nn.init.trunc_normal_(self.position, std=0.02)
        self.blocks = nn.Sequential(*(Block(width, heads, 2 * width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        tokens_NTC = self.patch(images).flatten(2).transpose(1, 2) + self.position
        scores: Tensor = self.head(self.norm(self.blocks(tokens_NTC)).mean(1))
        return scores
