"""Every public entry checks its arguments, and nothing raw leaves qtk's own code."""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import numpy
import pytest
import torch
from torch import nn

import qtk
from qtk.cli import inspect as inspection
from qtk.cli import quantize as running
from qtk.cli import recipe, verify
from qtk.errors import ArgumentError, ConfigError, InternalError, QtkError, SpecError
from qtk.public import ANNOTATIONS_ATTR, RejectsUnknownAttributes, fits, public, runs_model
from qtk.quantsim import QuantSim

X = torch.randn(4, 8)


def entries() -> dict[str, Callable[..., Any]]:
    """The functions and classes of the package's surface: methods of handles, constructors of values."""
    found = {}
    for name in qtk.__all__:
        item = getattr(qtk, name)
        if inspect.isfunction(item):
            found[name] = item
        elif inspect.isclass(item) and not issubclass(item, (Exception, qtk.PreparedModel)) and name != "Mode":
            inherited = {each for base in item.__mro__[1:] for each in vars(base)}
            members = {each: getattr(item, each) for each in vars(item) if not each.startswith("_")} | (
                {"__init__": item.__init__} if "__init__" in vars(item) else {}
            )
            found |= {
                f"{name}.{each}": member for each, member in members.items()
                if inspect.isroutine(member) and (each == "__init__" or each not in inherited)
                and (not dataclasses.is_dataclass(item) or each == "__init__" or inspect.ismethod(member))
            }
    commands = (running.quantize, running.export, inspection.inspect, verify.verify, recipe.load_recipe)
    return found | {f"{command.__module__}.{command.__name__}": command for command in commands}


@pytest.mark.medium
@pytest.mark.parametrize("name", entries())
def test_every_entry_is_marked(name):
    assert getattr(entries()[name], ANNOTATIONS_ATTR, False), f"{name} lacks @public"


@pytest.mark.parametrize(("value", "annotation", "fit"), [
    (3, int, True), (3.0, int, False), (True, int, False), (numpy.int64(3), int, True), (numpy.float32(3), float, True),
    (3, float, True), ("3", float, False), (None, None, True), (0, None, False), (0, bool, False), (True, bool, True),
    ("a", str | None, True), (b"a", str | None, False), ("asym", Literal["asym"], True),
    ("sym", Literal["asym"], False),
    (["a"], list[str], True), ([1], list[str], False), ((1, 2), tuple[int, ...], True),
    ((1, "a"), tuple[int, ...], False),
    ((1, "a"), tuple[int, str], True), ((1,), tuple[int, str], False), ({"a": 1}, Mapping[str, int], True),
    ({1: 1}, Mapping[str, int], False), ({"a": "b"}, Mapping[str, int], False), (print, Callable[[int], int], True),
    (3, Callable[[int], int], False), (iter([3]), Iterable[str], True), (3, Iterable[str], False), (3, Any, True),
])
def test_a_value_fits_its_annotation(value, annotation, fit):
    assert fits(value, annotation) is fit


def test_a_value_is_shown_however_large():
    bomb = [0]
    for _ in range(100):
        bomb = [bomb] * 9
    with pytest.raises(ArgumentError, match=r"dtype: name must be a str, got \[\[\[") as caught:
        qtk.dtype(bomb)
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize(("args", "kwargs", "said"), [
    (("int8", 3), {}, "too many positional arguments"), ((), {}, "missing a required argument: 'name'"),
    (("int8",), {"name": "int8"}, "multiple values for argument 'name'"),
    (("int8",), {"bits": 8}, "got an unexpected keyword argument 'bits'"),
])
def test_a_call_that_does_not_bind_names_the_signature(args, kwargs, said):
    with pytest.raises(ArgumentError, match=rf"dtype: {said}; its signature is dtype\(name\)"):
        qtk.dtype(*args, **kwargs)


def sim() -> QuantSim:
    return QuantSim(nn.Sequential(nn.Linear(8, 4), nn.ReLU()).eval(), X)


@pytest.mark.medium
@pytest.mark.sample(18)
@pytest.mark.parametrize(("call", "said"), [
    (lambda: sim().compute_encodings([X], sites=3), "compute_encodings: sites must be .*, got 3"),
    (lambda: sim().compute_encodings([X], sites=[3]), r"compute_encodings: sites must be .*, got \[3\]"),
    (lambda: sim().compute_encodings([X], num_batches=1.5), "num_batches must be an int or None, got 1.5"),
    (lambda: sim().compute_encodings([X], forward=3), "forward must be .*function or None, got 3"),
    (lambda: sim().compute_encodings([X], progress="no"), "progress must be a bool, got 'no'"),
    (lambda: sim().export("x", formats=3), "QuantSim.export: formats must be an iterable of str or str, got 3"),
    (lambda: sim().export("x", force="no"), "QuantSim.export: force must be a bool, got 'no'"),
    (lambda: sim().export(3), "QuantSim.export: directory must be a str or path, got 3"),
    (lambda: sim().save(None), "QuantSim.save: directory must be a str or path, got None"),
    (lambda: sim().freeze(3), "QuantSim.freeze: sites must be"),
    (lambda: sim().set_range("1:out", "0", "1"), "QuantSim.set_range: low must be a float, got '0'"),
    (lambda: QuantSim.load(3, nn.Linear(1, 1), X), "QuantSim.load: directory must be"),
    (lambda: qtk.apply_gptq(sim(), [X], damping=None), "apply_gptq: damping must be a float, got None"),
    (lambda: qtk.apply_adaround(sim(), [X], iterations=1.5), "apply_adaround: iterations must be an int, got 1.5"),
    (lambda: qtk.apply_layerwise(sim(), [X], 3), "apply_layerwise: methods must be"),
    (lambda: qtk.apply_layerwise(sim(), [X], [3]), r"apply_layerwise: methods must be .*, got \[3\]"),
    (lambda: type(qtk.SCHEMES["mse"])(steps=None), "Mse: steps must be an int, got None"),
    (lambda: qtk.PerBlock(32), "PerBlock: sizes must be a tuple of int, got 32"),
    (lambda: qtk.PerBlock((32, None)), "PerBlock: sizes must be a tuple of int"),
    (lambda: qtk.PerChannel("0"), "PerChannel: axis must be an int, got '0'"),
    (lambda: qtk.QuantSpec("int8"), "QuantSpec: dtype must be a QDtype, got 'int8'"),
    (lambda: qtk.dtype(None), "dtype: name must be a str, got None"),
    (lambda: qtk.Encoding(None, None), "Encoding: spec must be a QuantSpec, got None"),
    (lambda: qtk.prepare_model(nn.Linear(8, 4), X, modules_to_exclude=3), "modules_to_exclude must be"),
])
def test_a_wrong_type_names_parameter_rule_and_value(call, said):
    with pytest.raises(ArgumentError, match=said):
        call()


def test_numbers_of_numpy_are_numbers():
    sim().compute_encodings([X, X], num_batches=numpy.int64(1), progress=False)


@pytest.mark.medium
@pytest.mark.parametrize("formats", [{"encodings"}, {"encodings": 1}.keys(), iter(["encodings"]), "encodings"])
def test_formats_may_be_any_iterable_or_one_name(tmp_path, formats):
    calibrated = sim()
    calibrated.compute_encodings([X], progress=False)
    calibrated.export(tmp_path / "out", formats=formats)
    assert (tmp_path / "out" / "encodings.json").exists()


@pytest.mark.parametrize("methods", [iter(["gptq"]), {"gptq": 1}.keys(), (name for name in ["gptq"]), "gptq"])
def test_methods_may_be_any_iterable_or_one_name(methods):
    assert qtk.apply_layerwise(sim(), [X], methods, progress=False).layers


@pytest.mark.parametrize("call", [
    lambda: qtk.apply_layerwise(sim(), [X], iter([3]), progress=False),
    lambda: sim().export("x", formats=iter([3])),
    lambda: qtk.prepare_model(nn.Sequential(nn.Linear(8, 4)), X, modules_to_exclude=iter([3])),
    lambda: sim().freeze(iter([3])),
])
def test_what_an_iterator_yields_is_checked_too(call):
    with pytest.raises(QtkError, match=r"3|int") as caught:
        call()
    assert not isinstance(caught.value, InternalError)


@public
def fails(callback: Callable[[], object]) -> object:
    return callback()


def test_what_qtk_raises_by_mistake_is_named_a_defect(monkeypatch):
    monkeypatch.setitem(globals(), "__name__", "qtk.somewhere")
    with pytest.raises(InternalError, match=r"fails failed in .*: KeyError: 'a'; .*a defect of qtk, please report"):
        fails(lambda: {}["a"])


@public
def evaluates(model: nn.Module) -> object:
    return runs(model)


@runs_model
def runs(model):
    return model(X)


def test_what_a_model_that_qtk_runs_raises_keeps_its_own_error(monkeypatch):
    monkeypatch.setitem(globals(), "__name__", "qtk.somewhere")
    graph = torch.fx.symbolic_trace(nn.Linear(5, 4))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        evaluates(graph)
    assert not isinstance(caught.value, InternalError)
    with pytest.raises(InternalError, match="AttributeError"):
        fails(lambda: X.nothing)


@pytest.mark.parametrize("library", ["triton.runtime", "sympy.core", "torch.nn"])
def test_an_error_in_a_library_is_of_who_called_it(monkeypatch, library):
    scope = {"__name__": library}
    exec("def compiles(): raise RuntimeError('out of resource')", scope)
    monkeypatch.setitem(globals(), "__name__", "qtk.somewhere")
    with pytest.raises(InternalError, match="out of resource"):
        fails(scope["compiles"])


def test_what_other_code_raises_keeps_its_own_error():
    def of_the_user() -> None:
        raise KeyError("theirs")

    def misnamed() -> None:
        raise SpecError("ours, on purpose")

    with pytest.raises(KeyError, match="theirs"):
        fails(of_the_user)
    with pytest.raises(SpecError):
        fails(misnamed)


def test_annotations_can_be_read():
    """A name that only a type checker sees would fail at the first call."""
    assert all(isinstance(getattr(entry, ANNOTATIONS_ATTR)(), dict) for entry in entries().values())


def test_an_int_of_more_digits_than_python_writes_is_shown_by_its_type():
    with pytest.raises(ArgumentError, match="dtype: name must be a str, got a int"):
        qtk.dtype(10**5000)


class Engine(RejectsUnknownAttributes):
    running: bool

    def __init__(self, power, fuel="diesel"):
        self.power, self.fuel = power, fuel
        self._hours = 0
        self.running = False

    @property
    def hours(self):
        return self._hours

    @hours.setter
    def hours(self, value):
        self._hours = value

    def start(self):
        self.running = True


@pytest.mark.parametrize(("name", "reason"), [
    ("fuel", r"it is settled when the Engine is made; make a new one, Engine\(…, fuel=…\)"),
    ("start", "it is a method of Engine; call it"),
    ("colour", "Engine has no such attribute; it has power, fuel"),
])
def test_what_would_have_no_effect_is_refused(name, reason):
    engine = Engine(3)
    before = dict(vars(engine))
    with pytest.raises(ConfigError, match=f"setting '{name}' would have no effect: {reason}"):
        setattr(engine, name, 1)
    assert vars(engine) == before


def test_what_acts_can_be_set():
    engine = Engine(3)
    engine.start()
    engine.hours = 7
    assert (engine.running, engine.hours, engine.power) == (True, 7, 3)


def test_a_subclass_may_have_a_constructor_of_its_own():
    class Racer(Engine):
        def __init__(self, *args, team, **settings):
            self.team = team
            super().__init__(*args, **settings)

    racer = Racer(3, team="blue")
    assert (racer.power, racer.fuel, racer.team) == (3, "diesel", "blue")
    with pytest.raises(ConfigError, match="settled when the Racer is made"):
        racer.team = "red"
