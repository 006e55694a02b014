"""Containers of tensors: what torch is told of, what it is not, and models that take and return them."""

import sys
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from torch import Tensor

import qtk
from qtk.calls.containers import (
    flatten_without_comparing,
    is_cache,
    register_containers,
    register_structure,
    registration_text,
    unregistered,
)
from qtk.calls.inputs import _check_nesting
from qtk.errors import CaptureError
from qtk.torch_private import flatten_as, pytree
from tests.capture.caches import Cache, Decoder, Loose, words


def equal(a, b):
    leaves, others = pytree.tree_leaves(a), pytree.tree_leaves(b)
    return len(leaves) == len(others) and all(map(torch.equal, leaves, others))


def test_a_dataclass_is_registered_with_those_in_it():
    @dataclass
    class Inner:
        x: Tensor

    @dataclass
    class Outer:
        inner: Inner
        y: Tensor

    value = Outer(Inner(torch.ones(1)), torch.zeros(2))
    assert [note.split()[0] for note in register_containers([value])] == ["Outer", "Inner"]
    assert [leaf.shape[0] for leaf in pytree.tree_leaves(value)] == [1, 2]
    assert [*register_containers([value])] == []


@pytest.fixture
def library(monkeypatch):
    """A package called transformers, with a base class of caches and no function to register them."""
    package = ModuleType("transformers")
    package.Cache = type("Cache", (), {})
    package.__path__ = []
    monkeypatch.setitem(sys.modules, "transformers", package)

    def add(module, function, called):
        for name in (module.partition(".")[0], module):
            made = ModuleType(f"transformers.{name}")
            made.__path__ = []
            monkeypatch.setitem(sys.modules, f"transformers.{name}", made)
        setattr(sys.modules[f"transformers.{module}"], function, called)

    package.add = add
    return package


def test_caches_of_a_loaded_library_are_registered_by_its_own_function(library):
    kinds = []
    library.add("exporters.exporter_dynamo", "register_pytree_node", kinds.append)
    dynamic, sliding = type("DynamicCache", (library.Cache,), {}), type("SlidingCache", (library.Cache,), {})
    assert len([*register_containers({"a": dynamic(), "b": [sliding()], "c": torch.ones(1)})]) == 2
    assert kinds == [dynamic, sliding]


def test_the_structure_of_another_process_is_registered(library):
    kinds = []
    library.add("exporters.exporter_dynamo", "register_pytree_node", kinds.append)
    dynamic = type("DynamicCache", (library.Cache,), {})
    pytree.register_pytree_node(dynamic, lambda value: ([torch.ones(1)], None), lambda tensors, rest: dynamic())
    structure = pytree.tree_structure({"cache": [dynamic(), Cache()]})
    del pytree.SUPPORTED_NODES[dynamic]
    register_structure(structure)
    assert kinds == [dynamic]


def test_an_older_version_knows_one_class(library):
    calls = []
    library.add("integrations.executorch", "register_dynamic_cache_export_support", lambda: calls.append("dynamic"))
    dynamic, sliding = type("DynamicCache", (library.Cache,), {}), type("SlidingCache", (library.Cache,), {})
    assert len([*register_containers([dynamic(), sliding()])]) == 1
    assert calls == ["dynamic"]


def test_a_library_that_is_not_loaded_is_not_loaded(monkeypatch):
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    assert not is_cache(Cache())
    assert [*register_containers([Cache(), Loose()])] == []
    assert "transformers" not in sys.modules


def test_what_torch_cannot_look_into_is_named_with_the_call():
    loose = Loose()
    loose.extend(0, torch.ones(1, 2, 4), torch.ones(1, 2, 4))
    assert unregistered([loose, Cache(), torch.ones(1), None, "x", torch.nn.Linear(1, 1)]) == {"Loose": Loose}
    assert "register_pytree_node(Loose, " in registration_text({"cache": loose})
    assert registration_text({"cache": Cache()}) is None


@pytest.fixture(scope="module")
def decoder():
    model = Decoder().eval()
    with torch.no_grad():
        past = model(words(2, 7))["cache"]
    step = {"ids": words(2, 3, seed=1), "cache": past}
    return model, qtk.prepare_model(model, {"ids": words(2, 7)}, variants=[step], dynamic_shapes="all"), step


@pytest.mark.medium
def test_a_model_that_returns_a_cache_is_one_graph(decoder):
    model, prepared, _ = decoder
    assert (prepared.report.rung, prepared.report.eval_difference) == ("export", 0)
    output = prepared(words(3, 5))
    assert type(output["cache"]) is Cache
    assert equal(output, model(words(3, 5)))


@pytest.mark.parametrize(("past", "new"), [(7, 3), (4, 1), (1, 2), (11, 6)])
def test_a_cache_goes_in_and_comes_out_grown_and_the_given_one_is_left_as_it_is(decoder, past, new):
    model, prepared, _ = decoder
    ids = words(2, past + new, seed=past)
    cache = prepared(ids[:, :past])["cache"]
    output = prepared(ids[:, past:], cache)
    assert equal(output, model(ids[:, past:], model(ids[:, :past])["cache"]))
    assert cache.keys[0].shape[1] == past
    torch.testing.assert_close(output["logits"], model(ids)["logits"][:, past:], rtol=1e-5, atol=1e-6)


def test_the_example_cache_is_left_as_it_is(decoder):
    _, _, step = decoder
    assert [key.shape[1] for key in step["cache"].keys] == [7]


@pytest.mark.medium
def test_an_empty_cache_may_be_given():
    model, empty = Decoder().eval(), Cache(65)
    prepared = qtk.prepare_model(model, {"ids": words(2, 7), "cache": empty})
    assert (prepared.report.rung, prepared.report.eval_difference, empty.keys) == ("export", 0, [])
    output = prepared(ids=words(3, 7), cache=Cache(65))
    assert equal(output, model(words(3, 7)))
    assert output["cache"].limit == 65


def test_a_concatenation_with_an_empty_tensor_leaves_no_trace(decoder):
    _, prepared, _ = decoder
    assert not prepared.graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default)


def test_what_is_no_tensor_of_a_container_is_compared(decoder):
    _, prepared, step = decoder
    other = pytree.tree_map(lambda leaf: leaf, step["cache"])
    other.limit = 65
    with pytest.raises(CaptureError, match="input cache has content 65, the model was captured for 64"):
        prepared(step["ids"], other)
    with pytest.raises(CaptureError, match="input cache is a Loose, the model was captured for a Cache"):
        prepared(step["ids"], Loose())


def test_devices_and_dtypes_among_the_settings_of_a_container_may_differ():
    structure = pytree.tree_structure(Cache({"_t": "obj", "sizes": [{"_t": "device", "s": "cpu"}, torch.float32, 3]}))
    moved = Cache({"_t": "obj", "sizes": [{"_t": "device", "s": "cuda:0"}, torch.float16, 3]})
    _check_nesting("cache", moved, structure)
    other = Cache({"_t": "obj", "sizes": [{"_t": "device", "s": "cpu"}, torch.float32, 4]})
    with pytest.raises(CaptureError, match="input cache has sizes 4, the model was captured for 3"):
        _check_nesting("cache", other, structure)


def test_generated_code_takes_a_class_apart_whatever_is_no_tensor_in_it():
    kind = type("Box", (), {"__init__": lambda self, x, note: vars(self).update(x=x, note=note)})
    pytree.register_pytree_node(kind, lambda box: ([box.x], box.note), lambda values, note: kind(*values, note))
    structure = pytree.tree_structure([kind(1, "a")])
    flatten_without_comparing(kind)
    assert flatten_as([kind(2, "b")], structure) == [2]


@pytest.mark.medium
def test_a_cache_that_torch_does_not_know_makes_islands_and_a_note():
    model = Decoder(Loose).eval()
    prepared = qtk.prepare_model(model, words(2, 7))
    assert prepared.report.rung == "python"
    assert any("register_pytree_node(Loose, " in note for note in prepared.report.notes)
    assert torch.equal(prepared(words(2, 7))["logits"], model(words(2, 7))["logits"])
    with pytest.raises(CaptureError, match=r"register_pytree_node\(Loose, "):
        qtk.prepare_model(model, {"ids": words(2, 7)}, dynamic_shapes={"ids": {0: "batch"}})
