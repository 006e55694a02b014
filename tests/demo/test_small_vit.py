"""The transformer against attention in loops over heads, and patches cut by hand, in float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from qtk.demo.models import build
from qtk.demo.small_vit import Attention, SmallViT


def attend(attention: Attention, x_NTC: Tensor) -> Tensor:
    q, k, v = attention.qkv(x_NTC).chunk(3, -1)
    heads = []
    for own in torch.arange(x_NTC.shape[-1]).chunk(attention.heads):
        weights = (q[..., own] @ k[..., own].transpose(1, 2) / len(own) ** 0.5).softmax(-1)
        heads.append(weights @ v[..., own])
    return attention.proj(torch.cat(heads, -1))


@torch.no_grad()
def test_patches_are_tokens_in_rows_and_blocks_normalize_first() -> None:
    model = build("digits_vit").double()
    assert isinstance(model, SmallViT)
    images = torch.rand(3, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    patches = [images[:, 0, row : row + 2, column : column + 2].reshape(3, 4)
               for row in range(0, 8, 2) for column in range(0, 8, 2)]
    x = torch.stack(patches, 1) @ model.patch.weight.reshape(-1, 4).T + model.patch.bias + model.position
    for block in model.blocks:
        x = x + attend(block.attn, block.norm1(x))
        up, _, down = block.mlp
        x = x + down(F.gelu(up(block.norm2(x))))
    torch.testing.assert_close(model(images), model.head(model.norm(x).mean(1)))
