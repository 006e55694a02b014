"""Attention and embeddings of the zoo."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class SelfAttention(nn.Module):
    """Written out in matmuls, additive -inf mask optional."""

    def __init__(self, width=16, heads=2, causal=False):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.attn_drop = nn.Dropout(0.1)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q @ k.transpose(-2, -1)) * (width // self.heads) ** -0.5
        if self.causal:
            scores = scores + torch.full((length, length), -math.inf, device=x.device, dtype=x.dtype).triu(1)
        return self.proj((self.attn_drop(scores.softmax(-1)) @ v).transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width=16, causal=False):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), SelfAttention(width, causal=causal)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, width))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TinyViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, 4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, 16))
        self.pos_embed = nn.Parameter(torch.randn(1, 5, 16))
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], 1) + self.pos_embed
        return self.head(self.blocks(x)[:, 0])


class TinyLanguageModel(nn.Module):
    """Embedding and head share one parameter; positions come from arange, the mask is -inf."""

    def __init__(self):
        super().__init__()
        self.embed, self.position = nn.Embedding(20, 16), nn.Embedding(8, 16)
        self.block = Block(causal=True)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.block(self.embed(tokens) + self.position(places)))


class FusedAttention(nn.Module):
    """scaled_dot_product_attention, with a boolean mask made from an integer input."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x, lengths):
        q, k, v = (layer(x).unflatten(-1, (2, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mask = torch.arange(x.shape[1], device=x.device)[None, None, None] < lengths[:, None, None, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


class MaskedFill(nn.Module):
    """Scores masked with the lowest number of their dtype, as Hugging Face models do."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, hidden_states, attention_mask=None):
        scores = self.q(hidden_states) @ self.k(hidden_states).mT
        if attention_mask is not None:
            scores = scores.masked_fill(attention_mask[:, None, :] == 0, torch.finfo(scores.dtype).min)
        return scores.softmax(-1) @ self.v(hidden_states)


class Torchs(nn.Module):
    """torch's own encoder layer, the fast path of which capture must not take."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)

    def forward(self, x):
        return self.layer(x)
