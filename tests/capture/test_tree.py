"""A copy of a model's tree with other modules in some places, and nothing else copied."""

from collections import OrderedDict
from functools import partial

import pytest
import torch
from torch import nn

from qtk.capture.tree import with_islands


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


class Refers(nn.Module):
    """Keeps its children in every way there is, and a hook that writes to it."""

    def __init__(self):
        super().__init__()
        self.fc, self.act = nn.Linear(4, 4), nn.ReLU()
        self.listed, self.nested = [self.fc, self.act], {"all": (self.fc, OrderedDict(act=self.act)), "n": 3}
        self.method, self.part = self.run, partial(self.run, scale=2.0)
        self.__dict__["hidden"] = self.fc
        self.loop = []
        self.loop.append(self.loop)
        self.outside, self.numbers, self.seen = nn.ModuleList([nn.ReLU()])[0], [1, 2], None
        self.act.register_forward_hook(self.keep)

    def keep(self, module, args, output):
        self.seen = output

    def run(self, x, scale=1.0):
        return self.act(self.fc(x)) * scale


def test_references_to_modules_of_the_tree_follow_into_the_copy():
    model, island = Refers(), nn.Linear(4, 4)
    twin = with_islands(model, {model.fc: island})
    assert twin.listed[0] is twin.nested["all"][0] is twin.hidden is twin.fc is island
    assert twin.listed[1] is twin.nested["all"][1]["act"] is twin.act is not model.act
    assert [type(twin.listed), type(twin.nested), type(twin.nested["all"][1])] == [list, dict, OrderedDict]
    assert list(twin.nested) == ["all", "n"]
    assert twin.method.__self__ is twin.part.func.__self__ is twin
    assert torch.equal(twin.part(X), torch.relu(island(X)) * 2)
    assert model.seen is None
    assert torch.equal(twin.seen, torch.relu(island(X)))
    assert model.listed[0] is model.hidden is model.fc
    assert model.method.__self__ is model


def test_what_refers_to_no_module_of_the_tree_is_the_same_object():
    model = Refers()
    twin = with_islands(model, {})
    assert twin.numbers is model.numbers
    assert twin.loop is model.loop
    assert with_islands(nn.Sequential(nn.ReLU()), {})[0] is not model.act
    other = nn.Module()
    other.elsewhere, other.call = [model.fc], model.run
    twin = with_islands(other, {})
    assert twin.elsewhere is other.elsewhere
    assert twin.call is other.__dict__["call"]


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_the_root_may_be_an_island_and_scripted_modules_share_their_parameters():
    model, island = Parent(), nn.ReLU()
    assert with_islands(model, {model: island}) is island
    scripted = torch.jit.script(nn.Linear(4, 4))
    twin = with_islands(nn.Sequential(scripted), {})[0]
    assert all(a is b for a, b in zip(twin.parameters(), scripted.parameters(), strict=True))
    twin.eval()
    assert scripted.training
