import copy

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.zoo.models import ZOO


@pytest.mark.parametrize("name", ZOO)
def test_is_the_same_every_time_and_uses_its_inputs(name):
    entry = ZOO[name]
    random = torch.get_rng_state()
    first, second = entry.model(), entry.model()
    assert torch.equal(torch.get_rng_state(), random)
    assert not first.training
    outputs = [pytree.tree_leaves(entry.run(copy.deepcopy(model))) for model in (first, second, second)]
    for a, b, c in zip(*outputs, strict=True):
        if isinstance(a, Tensor):
            assert torch.equal(a, b)
            assert torch.equal(a, c)
            assert torch.isfinite(a).all()
    if entry.dynamic:
        assert {len(leaf) for leaf in pytree.tree_leaves(entry.inputs(3)) if isinstance(leaf, Tensor)} == {3}
        entry.run(first, 3)


def test_there_are_enough():
    assert len(ZOO) >= 24
