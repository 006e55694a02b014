"""Tensors of every shape of distribution, and histograms counted by numpy alone."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

COUNT = 4000


def _random(generator: torch.Generator) -> Tensor:
    return torch.randn(COUNT, generator=generator)


DATA = {
    "random": _random,
    "skewed": lambda g: torch.randn(COUNT, generator=g).exp(),
    "bimodal": lambda g: torch.cat([torch.randn(COUNT // 2, generator=g) + center for center in (-6, 3)]),
    "outlier": lambda g: torch.cat([torch.randn(COUNT - 1, generator=g), torch.tensor([80.0])]),
    "one_sided": lambda g: torch.randn(COUNT, generator=g).relu(),
    "negative": lambda g: -torch.rand(COUNT, generator=g) - 0.5,
    "far_from_zero": lambda g: torch.rand(COUNT, generator=g) + 50,
    "constant": lambda g: torch.full((COUNT,), 0.7),
    "zero": lambda g: torch.zeros(COUNT),
    "few_values": lambda g: torch.randint(-3, 5, (COUNT,), generator=g).float() / 4,
    "tiny": lambda g: torch.randn(COUNT, generator=g) * 1e-20,
    "huge": lambda g: torch.randn(COUNT, generator=g) * 1e20,
}


def data(name: str, seed: int = 0) -> Tensor:
    """A vector. Shape: [COUNT]."""
    return DATA[name](torch.Generator().manual_seed(seed))


def histogram(x: Tensor, bins: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Middles, counts and half a width of the histogram that ``qtk.observers.histogram`` defines, in float64."""
    values = x.double().numpy()
    low, high = values.min(), values.max()
    if low == high:
        width = 2.0 ** (math.frexp(low)[1] - 24) if low else 2.0**-100
    else:
        width = 2.0 ** max(-100, math.frexp(max(abs(low), abs(high)))[1] - 24)
        while math.floor(high / width) - math.floor(low / width) + 1 > 2 * bins:
            width *= 2
    first = math.floor(low / width)
    slots = np.floor(values / width).astype(np.int64) - first
    counts = np.bincount(slots, minlength=2 * bins)
    middles = np.clip((first + np.arange(2 * bins) + 0.5) * width, low, high)
    return middles, counts, width / 2
