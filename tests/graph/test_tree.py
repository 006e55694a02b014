"""A copy of a model's tree with other modules in some places, and nothing else copied."""

import pytest
import torch
from torch import nn

from qtk.graph.tree import with_islands


class Parent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.alias = self.body[0]
        self.head = nn.Linear(4, 2)
        self.width = [4]
        self.register_buffer("table", torch.zeros(2), persistent=False)
        self.nothing = None
        self.register_module("empty", None)

    def forward(self, x):
        return self.head(self.body(self.alias(x))) + self.table


X = torch.randn(3, 4)


def test_only_the_tree_is_copied():
    model, island = Parent(), nn.Linear(4, 2)
    twin = with_islands(model, {model.head: island})
    assert type(twin) is Parent
    assert twin.head is island
    assert model.head is not island
    assert twin.body is not model.body
    assert twin.body[0].weight is model.body[0].weight
    assert twin.table is model.table
    assert twin.width is model.width
    assert twin.empty is None
    names = [[path for path, _ in each.named_modules(remove_duplicate=False)] for each in (twin, model)]
    assert names[0] == names[1]


def test_without_islands_it_computes_the_same():
    model = Parent()
    assert torch.equal(with_islands(model, {})(X), model(X))


def test_a_module_with_two_names_has_one_copy_or_one_island():
    model, island = Parent(), nn.Linear(4, 4)
    twin = with_islands(model, {})
    assert twin.alias is twin.body[0]
    twin = with_islands(model, {model.alias: island})
    assert twin.alias is twin.body[0] is island


def test_members_and_hooks_of_the_copy_are_its_own():
    model = Parent()
    calls = []
    model.head.register_forward_hook(lambda *_: calls.append("old"))
    twin = with_islands(model, {})
    twin.head.register_forward_hook(lambda *_: calls.append("new"))
    twin.head.new = nn.ReLU()
    twin.register_buffer("other", torch.ones(1))
    del twin.body[1]
    twin.eval()
    assert len(model.body) == 2
    assert not hasattr(model, "other")
    assert not hasattr(model.head, "new")
    assert model.training
    model(X)
    assert calls == ["old"]
    twin.head(X)
    assert calls == ["old", "old", "new"]


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_the_root_may_be_an_island_and_scripted_modules_stay():
    model, island = Parent(), nn.ReLU()
    assert with_islands(model, {model: island}) is island
    scripted = torch.jit.script(nn.Linear(4, 4))
    assert with_islands(nn.Sequential(scripted), {})[0] is scripted
