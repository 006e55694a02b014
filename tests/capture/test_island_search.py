"""Which modules become islands, and what is done when one does not do in its place."""

import random
from functools import partial

import pytest
import torch
from torch import nn

from qtk.calls.call_recording import record_calls
from qtk.calls.calls import Call
from qtk.capture import island_search
from qtk.capture.island_search import capture_tree
from qtk.capture.prepared_model import PreparedTree
from qtk.capture.verify_prepared import eval_outcome
from qtk.errors import CaptureError, VerificationError
from tests.zoo.python import sign

X = torch.randn(4, 8)
ONE = [Call((X,), {}, None)]


class Parent(nn.Module):
    """Python around one child and a head."""

    def __init__(self, child):
        super().__init__()
        self.child, self.head = child, nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.child(x * sign(x)))


class SignAlone(nn.Module):
    """Nothing captures it, and it calls no other module."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return x * self.weight * sign(x)


def tree(model, **options) -> PreparedTree:
    expected = eval_outcome(model, (X,), {})
    call = Call((X,), {}, None)
    return capture_tree(model, [call], "batch", CaptureError("no graph"), expected=[expected], **options)


def parts(prepared):
    return {part.path: part.rung for part in prepared.report.parts}


@pytest.mark.medium
def test_a_leaf_that_nothing_captures_is_opaque_with_a_reason():
    model = Parent(SignAlone())
    prepared = tree(model)
    assert parts(prepared) == {"": "python", "child": "opaque", "head": "export"}
    opaque = next(part for part in prepared.report.parts if part.rung == "opaque")
    assert "data-dependent" in opaque.reason
    assert opaque.parameters == 8
    assert prepared.report.captured == 36 / 44
    assert torch.equal(prepared(X), model(X))


def test_excluded_modules_are_not_climbed():
    prepared = tree(Parent(nn.Sequential(nn.Linear(8, 8), nn.ReLU())), excluded={"child"})
    assert parts(prepared) == {"": "python", "child": "excluded", "head": "export"}
    assert type(prepared.child) is nn.Sequential


class AsksForType(Parent):
    def forward(self, x):
        x = self.child(x * sign(x))
        return self.head(x if isinstance(self.child, nn.Sequential) else -x)


class AsksForItem(Parent):
    def forward(self, x):
        return self.head(self.child(x * sign(x)) + self.child[0](x))


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("parent", [AsksForType, AsksForItem])
def test_an_island_that_its_parent_does_not_take_gives_way_to_those_inside(parent):
    model = parent(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))
    prepared = tree(model)
    rungs = parts(prepared)
    assert rungs["child"] == "python"
    assert rungs["child.0"] == rungs["child.2"] == rungs["head"] == "export"
    assert next(part.reason for part in prepared.report.parts if part.path == "child")
    assert torch.equal(prepared(X), model(X))


class Reference(nn.Module):
    """Calls its child by a reference that it keeps beside it."""

    def __init__(self, refer):
        super().__init__()
        self.child, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.call = refer(self)

    def run(self, x):
        return self.child(x)

    def forward(self, x):
        return self.head(self.call(x * sign(x)))


@pytest.mark.parametrize(
    "refer", [lambda model: model.child, lambda model: model.run, lambda model: partial(model.run)]
)
def test_a_child_called_by_a_reference_is_an_island_that_is_called(refer):
    model = Reference(refer)
    prepared = tree(model)
    assert parts(prepared) == {"": "python", "child": "export", "head": "export"}
    assert list(record_calls(prepared, ONE, of=[prepared.child])) == [prepared.child]


def test_a_child_whose_island_is_passed_by_stays_and_is_told():
    model = Reference(lambda model: lambda x: model.child(x))
    prepared = tree(model)
    assert parts(prepared) == {"": "python", "child": "opaque", "head": "export"}
    assert "by a reference that a copy of the model cannot follow" in str(prepared.report)
    assert prepared.report.captured == 36 / 108
    assert torch.equal(prepared(X), model(X))


@pytest.mark.medium
def test_what_a_hook_of_a_child_writes_to_its_parent_is_written():
    class Hooked(Parent):
        def __init__(self):
            super().__init__(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))
            self.seen = None
            self.child[1].register_forward_hook(self.keep)

        def keep(self, module, args, output):
            self.seen = output

        def forward(self, x):
            x = self.child(x * sign(x))
            return self.head(x + self.seen)

    model = Hooked()
    prepared = tree(model)
    assert model.seen is None
    rungs = parts(prepared)
    assert (rungs["child.0"], rungs["child.1"], rungs["child.2"]) == ("export", "opaque", "export")
    other = torch.randn(7, 8)
    found = prepared(other)
    assert model.seen is None
    assert torch.equal(found, model(other))


@pytest.mark.medium
def test_a_child_called_through_python_and_directly_is_one_graph_for_both():
    class Twice(Parent):
        def forward(self, x):
            return self.head(self.child(x * sign(x))) + self.head(x[:1])

    prepared = tree(Twice(SignAlone()))
    assert parts(prepared)["head"] == "export"
    assert prepared.report.dynamic


@pytest.mark.medium
def test_a_model_that_does_not_repeat_itself_is_told_so():
    class Noise(nn.Module):
        def forward(self, x):
            return x * random.random()

    with pytest.raises(VerificationError, match="Parent does not repeat itself"):
        tree(Parent(Noise()))


def test_parts_that_do_not_add_up_are_an_error(monkeypatch):
    real = island_search.eval_difference

    def differs(original, prepared, *args, **kwargs):
        if isinstance(prepared, PreparedTree):
            raise VerificationError("planted")
        return real(original, prepared, *args, **kwargs)

    monkeypatch.setattr(island_search, "eval_difference", differs)
    with pytest.raises(VerificationError, match="do not add up to it: VerificationError: planted"):
        tree(SignAlone())


@pytest.mark.medium
def test_the_model_is_left_as_it_was():
    model = Parent(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), SignAlone())).train()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    modules = list(model.modules())
    tree(model)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert list(model.modules()) == modules
    assert all(module.training and not module._forward_hooks for module in modules)
