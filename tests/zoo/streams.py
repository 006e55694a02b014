"""Models on streams, which keep what they need of the past in buffers that forward writes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CachedConv(nn.Module):
    """A causal convolution over frames: [1, 4, frames] → the same; the last frames wait in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 3)
        self.register_buffer("past", torch.zeros(1, 4, 2))

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.cat([self.past, x], 2)
        self.past = seen[:, :, -2:]
        return F.relu(self.conv(seen))


class Recurrent(nn.Module):
    """A GRU cell over frames [2, 4] → [2, 4], and the number of frames."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(4, 6), nn.Linear(6, 4)
        self.register_buffer("h", torch.zeros(2, 6))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.h.copy_(self.cell(x, self.h))
        self.steps += 1
        return self.head(self.h)


class KeyValueCache(nn.Module):
    """Attention over the tokens so far: one token [1, 1, 8] and its position [1] → [1, 1, 8]."""

    def __init__(self, length: int = 16) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.register_buffer("keys", torch.zeros(1, 1, length, 8))
        self.register_buffer("values", torch.zeros(1, 1, length, 8))
        self.register_buffer("places", torch.arange(length), persistent=False)

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        self.keys[:, :, position] = self.key(x)[:, None]
        self.values[:, :, position] = self.value(x)[:, None]
        mask = self.places <= position[:, None]
        return x + F.scaled_dot_product_attention(self.query(x)[:, None], self.keys, self.values, attn_mask=mask)[:, 0]


class Average(nn.Module):
    """What frames [2, 4] have above their running average, which begins with the first of them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("seen", torch.zeros((), dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.inner(x))
        self.mean = 0.9 * torch.where(self.seen, self.mean, y.mean(0)) + 0.1 * y.mean(0)
        self.seen.fill_(True)
        return self.outer(y - self.mean)


class Ring(nn.Module):
    """A weighted sum of the last 8 frames [2, 4], which a ring holds: → [2, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(32, 4)
        self.register_buffer("ring", torch.zeros(2, 8, 4))
        self.register_buffer("place", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.ring.index_copy_(1, self.place.reshape(1), self.inner(x)[:, None])
        self.place.copy_((self.place + 1) % 8)
        return self.outer(self.ring.flatten(1))


class Streams(nn.Module):
    """Two of them in one model: [2, 4] → [2, 4]; what is returned is the state itself."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.mixed = Recurrent(), nn.Linear(4, 4)
        self.register_buffer("last", torch.zeros(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        before = self.last
        self.last = torch.tanh(self.mixed(self.recurrent(x)) + 0.5 * before)
        return self.last


def frames(name: str, count: int) -> list[tuple[Tensor, ...]]:
    """The inputs of so many calls of the model in ``STREAMS`` called ``name``."""
    generator = torch.Generator().manual_seed(0)
    shape = {"cached_conv": (1, 4, 3), "key_value_cache": (1, 1, 8)}.get(name, (2, 4))
    given = torch.randn(count, *shape, generator=generator)
    return [(x, torch.tensor([step])) if name == "key_value_cache" else (x,) for step, x in enumerate(given)]


STREAMS = {
    "cached_conv": CachedConv, "recurrent": Recurrent, "key_value_cache": KeyValueCache, "average": Average,
    "ring": Ring, "streams": Streams,
}


def stream(name: str) -> nn.Module:
    """The model of that name in eval mode, with the same parameters each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return STREAMS[name]().eval()
