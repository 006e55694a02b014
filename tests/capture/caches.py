"""A decoder with a cache of a class of its own, which grows in place as caches of transformers do."""

import torch
from torch import nn
from torch.utils import _pytree as pytree

WIDTH, WORDS = 16, 30


class Cache:
    """Keys and values of each layer; ``limit`` is a setting, no tensor."""

    def __init__(self, limit=64):
        self.limit, self.keys, self.values = limit, [], []

    def extend(self, layer, key, value):
        if layer == len(self.keys):
            self.keys.append(torch.tensor([]))
            self.values.append(torch.tensor([]))
        self.keys[layer] = torch.cat([self.keys[layer], key], -2)
        self.values[layer] = torch.cat([self.values[layer], value], -2)
        return self.keys[layer], self.values[layer]


class Loose(Cache):
    """The same, of a class that is not registered."""


def _rebuilt(tensors, limit):
    cache = Cache(limit)
    cache.keys, cache.values = tensors[:len(tensors) // 2], tensors[len(tensors) // 2:]
    return cache


def _flat(cache):
    return [*cache.keys, *cache.values], cache.limit


def _flat_with_keys(cache):
    tensors, limit = _flat(cache)
    return [(pytree.SequenceKey(index), tensor) for index, tensor in enumerate(tensors)], limit


pytree.register_pytree_node(Cache, _flat, _rebuilt, flatten_with_keys_fn=_flat_with_keys)


class Layer(nn.Module):
    def __init__(self, index):
        super().__init__()
        self.index, self.qkv, self.out = index, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, cache):
        query, key, value = self.qkv(x).chunk(3, -1)
        key, value = cache.extend(self.index, key, value)
        at = torch.arange(key.shape[1])
        mask = at <= at[key.shape[1] - x.shape[1]:, None]
        scores = (query @ key.transpose(1, 2) / 4).masked_fill(~mask, float("-inf"))
        return x + self.out(scores.softmax(-1) @ value)


class Decoder(nn.Module):
    """Takes and returns a cache, by default a new one."""

    def __init__(self, kind=Cache):
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.embed, self.head = kind, nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList([Layer(0)])

    def forward(self, ids, cache=None, use_cache=True):
        cache = self.kind() if cache is None else cache
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, cache)
        return {"logits": self.head(x), "cache": cache} if use_cache else {"logits": self.head(x)}

    def greedy(self, ids, count, cached=True):
        """The next words, one by one."""
        given, cache = ids, None
        for _ in range(count):
            output = self(given, **({} if cache is None else {"cache": cache}))
            ids = torch.cat([ids, output["logits"][:, -1:].argmax(-1)], 1)
            given, cache = (ids[:, -1:], output["cache"]) if cached else (ids, None)
        return ids


def words(batch, length, seed=0):
    return torch.randint(WORDS, (batch, length), generator=torch.Generator().manual_seed(seed))
