"""What caches are made of."""

import pytest
import torch

from qtk.calls.containers import register_containers
from qtk.capture.container_code import Leaf, Parts, parts_of
from qtk.torch_private import pytree
from tests.capture.caches import Cache


def test_a_class_of_the_users_is_made_by_its_own_function():
    _, spec = pytree.tree_flatten(Cache())
    assert parts_of(spec) is None


def test_a_cache_of_transformers_is_its_class_and_its_attributes():
    transformers = pytest.importorskip("transformers")
    cache = transformers.DynamicCache()
    cache.update(torch.ones(1, 1, 2, 4), torch.zeros(1, 1, 2, 4), 0)
    list(register_containers(cache))
    _, spec = pytree.tree_flatten(cache)
    parts = parts_of(spec)
    assert isinstance(parts, Parts)
    assert parts.kind is transformers.DynamicCache
    layer = parts.state["layers"][0]
    assert {layer.state["keys"], layer.state["values"]} == {Leaf(0), Leaf(1)}
    made = Parts.make(layer.kind, layer.state)
    assert type(made) is type(cache.layers[0])
    assert vars(made) == layer.state
