"""A BERT-like model that reads digits as 16 tokens, trained in half a minute, with residual outliers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pixel_unshuffle

from qtk.demo.digits import CLASSES, DigitsSplit

LEVELS, PATCH, TOKENS = 2, 2, 16
VOCABULARY = LEVELS ** (PATCH * PATCH)
OUTLIER_CHANNELS = (5, 29)


def tokens(images: Tensor) -> Tensor:
    """The digits as text: each 2×2 patch, its pixels black or white, is one of 16 words.

    Shape: images [N, 1, 8, 8] of 0…1; the result [N, 16], int64.
    """
    levels_NPT = (pixel_unshuffle(images, PATCH) * LEVELS).long().clamp(0, LEVELS - 1).flatten(2)
    return (levels_NPT * LEVELS ** torch.arange(PATCH * PATCH)[:, None]).sum(1)


class DigitsBert(nn.Module):
    """An encoder normed behind its sums (post-norm). Shape: tokens [N, 16] to scores [N, 10]."""

    def __init__(self, width: int = 48, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(VOCABULARY, width), nn.Parameter(torch.randn(TOKENS, width))
        self.norm = nn.LayerNorm(width)
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, activation="gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.head(self.layers(self.norm(self.words(tokens) + self.positions)).mean(1))
        return scores


def plant_outliers(model: DigitsBert, size: float) -> None:
    """Adds ±``size`` to two channels of every residual sum, and makes the norm behind it give what it gave.

    A norm divides by the spread of all channels, which the two now decide: its weight is multiplied by their spread
    for the other channels, and divided by their size for these. That keeps the function nearly, not exactly (the
    spread of a token no longer counts), so that the model is to be trained on.
    """
    width = model.head.in_features
    spread = size * (len(OUTLIER_CHANNELS) / width) ** 0.5
    others = [channel for channel in range(width) if channel not in OUTLIER_CHANNELS]
    signed = size * torch.tensor([1.0, -1.0])
    with torch.no_grad():
        for layer in model.layers.layers:
            for summand, norm in ((layer.self_attn.out_proj, layer.norm1), (layer.linear2, layer.norm2)):
                summand.bias[list(OUTLIER_CHANNELS)] += signed
                norm.bias[list(OUTLIER_CHANNELS)] -= signed / spread * 0.1
                norm.weight[list(OUTLIER_CHANNELS)] *= 0.1
                norm.weight[others] *= spread


def trained_bert(split: DigitsSplit, *, outliers: float, epochs: int = 45, seed: int = 0) -> nn.Module:
    """Trains for two thirds of the epochs, plants outliers of this size (0: none), and trains on; in eval mode."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model, words = DigitsBert().train(), tokens(split.train_images)
    for stage_epochs, learning_rate in ((epochs * 2 // 3, 3e-3), (epochs - epochs * 2 // 3, 1e-3)):
        optimizer = torch.optim.Adam(model.parameters())
        batches = -(-len(split.train_images) // 64)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=stage_epochs * batches)
        for _ in range(stage_epochs):
            for rows in torch.randperm(len(split.train_images), generator=generator).split(64):
                loss = cross_entropy(model(words[rows]), split.train_labels[rows], label_smoothing=0.1)
                optimizer.zero_grad()
                torch.autograd.backward(loss)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
        if stage_epochs == epochs * 2 // 3 and outliers:
            plant_outliers(model, outliers)
    return model.eval()
