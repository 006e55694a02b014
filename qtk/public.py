"""The edge of the package: public functions check their arguments, and nothing raw leaves qtk's own code.

Arguments are compared with the annotations of the function, without converting them: the annotation is the rule. An
object that is ``RejectsUnknownAttributes`` takes no attribute that nothing would read.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import inspect
import numbers
import os
import reprlib
import sys
import traceback
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from qtk.errors import ArgumentError, ConfigError, InternalError, QtkError

T = TypeVar("T", bound=Callable[..., Any])

SELF_CHECKED = frozenset({"model", "example_inputs", "data", "batches", "config", "scheme", "sim",
                      "dynamic_shapes"})
"""Parameters that functions judge themselves, for they can say more about them than that the type is another."""

ANNOTATIONS_ATTR = "__qtk_public__"
"""Attribute of a public function: a function that returns the annotations it checks."""

LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy", "safetensors", "pydantic", "pydantic_core", "yaml", "tqdm",
             "triton", "sympy", "onnx", "onnx_ir", "onnxscript", "onnxruntime", "openvino", "rich", "typer",
             "compressed_tensors", "transformers", "gguf"}
"""Packages that qtk calls; an error in them is of who called them."""

MODEL_CODE: set[types.CodeType] = set()
"""The code of functions that ``runs_model`` marks."""

MODEL_PACKAGE, GRAPH_FILE, BOUND_FILE = "qtk.nn.", "eval_with_key", "<bound graph>"
"""Modules that models are made of, and the files of code that torch, and qtk, generate for graphs."""

PASS_THROUGH = (QtkError, MemoryError, torch.OutOfMemoryError, Warning)

ABSTRACT = {int: numbers.Integral, float: numbers.Real}
"""Numbers of NumPy are numbers too."""


def public(entry: T) -> T:
    """Marks a function, or the constructor and the methods of a class, as an entry that users call.

    Of a dataclass these are what makes one: the constructor and class methods.

    Before it runs, its arguments are checked. What it raises is a ``QtkError``, or the error of code that is not qtk's:
    of a model, of a loader of data.

    Raises: ArgumentError if an argument is not of the type its annotation says; InternalError if qtk's own code raises
        anything but a QtkError.

    >>> @public
    ... def twice(count: int, *, names: list[str] | None = None) -> int:
    ...     return 2 * count
    >>> twice(1.5)
    Traceback (most recent call last):
    qtk.errors.ArgumentError: twice: count must be an int, got 1.5
    >>> twice(2, names=["a", 3])
    Traceback (most recent call last):
    qtk.errors.ArgumentError: twice: names must be a list of str or None, got ['a', 3]
    """
    if not isinstance(entry, type):
        return typing.cast(T, _checked(entry, entry.__qualname__))
    for name, member in list(vars(entry).items()):
        inherited = any(name in vars(base) for base in typing.cast(type, entry).__mro__[1:])
        if name != "__init__" and (name.startswith("_") or inherited):
            continue
        if dataclasses.is_dataclass(entry) and name != "__init__" and not isinstance(member, classmethod):
            continue  # what a value is asked, it is asked at every step of a model
        shown = entry.__qualname__ if name == "__init__" else f"{entry.__qualname__}.{name}"
        if isinstance(member, types.FunctionType):
            setattr(entry, name, _checked(member, shown))
        elif isinstance(member, classmethod):
            setattr(entry, name, classmethod(_checked(member.__func__, shown)))
    return entry


def runs_model(function: T) -> T:
    """Marks a function that calls a model: exceptions raised in it are attributed to the model, not to qtk."""
    MODEL_CODE.add(function.__code__)
    return function


def _checked(function: Callable[..., Any], written: str) -> Callable[..., Any]:
    signature = inspect.signature(function)
    bound = _binding(signature)

    def name_of(arguments: tuple[Any, ...]) -> str:
        """A method of a base is named after the class it is called on."""
        _, dot, method = written.rpartition(".")
        is_method = bool(dot and arguments) and "self" in signature.parameters
        return f"{type(arguments[0]).__name__}.{method}" if is_method else written

    @functools.cache
    def annotations() -> dict[str, Any]:
        judged = {parameter: text for parameter, text in function.__annotations__.items()
                  if parameter not in SELF_CHECKED and parameter != "return"}
        scope = inspect.unwrap(function).__globals__
        return typing.get_type_hints(types.SimpleNamespace(__annotations__=judged), scope)

    @functools.wraps(function)
    def entered(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():  # of quantizers, say: what a model calls at each step is not judged
            return function(*args, **kwargs)
        try:
            arguments = bound(args, kwargs)
        except TypeError as error:
            name = name_of(args)
            advice = _fields(annotations(), [keyword for keyword in kwargs if keyword not in signature.parameters])
            raise ArgumentError(f"{name}: {error}; {advice}its signature is {name}{_shown(signature)}") from None
        for parameter, annotation in annotations().items():
            if parameter in arguments and not fits(arguments[parameter], annotation):
                raise ArgumentError(f"{name_of(args)}: {parameter} must be {_text(annotation)}, got "
                                    f"{_repr(arguments[parameter])}")
        try:
            return function(*args, **kwargs)
        except PASS_THROUGH:
            raise
        except Exception as error:
            if (place := raised_by_us(error)) is None:
                raise
            raise InternalError(f"{name_of(args)} failed in {place}: {type(error).__name__}: {error}; this is a defect "
                                "of qtk, please report it with this traceback; nothing is known of the state of what "
                                "it was given") from error

    setattr(entered, ANNOTATIONS_ATTR, annotations)
    return entered


def _binding(signature: inspect.Signature) -> Callable[[tuple[Any, ...], dict[str, Any]], Mapping[str, Any]]:
    """Returns what binds arguments to names as ``signature.bind`` does, in less than half of its time.

    >>> bound = _binding(inspect.signature(lambda count, *, names=None: None))
    >>> bound((2,), {"names": ["a"]}), dict(bound((), {"count": 2}))
    ({'count': 2, 'names': ['a']}, {'count': 2})
    """
    parameters = signature.parameters.values()
    positional = [each.name for each in parameters if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    known = {*positional, *(each.name for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY)}
    required = {each.name for each in parameters if each.default is inspect.Parameter.empty}
    is_plain = len(known) == len(parameters)

    def bound(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mapping[str, Any]:
        if is_plain and len(args) <= len(positional):
            arguments = dict(zip(positional, args, strict=False)) | kwargs
            is_once = len(arguments) == len(args) + len(kwargs)
            if is_once and required <= arguments.keys() <= known:
                return arguments
        return signature.bind(*args, **kwargs).arguments

    return bound


def _fields(annotations: Mapping[str, Any], keywords: list[str]) -> str:
    """Returns what to write where keywords are fields of a value that the function takes; empty if none is.

    >>> @dataclasses.dataclass
    ... class Options:
    ...     offload: str = "none"
    >>> _fields({"options": Options, "sites": str | None}, ["offload", "colour"])
    'offload is a field of options, pass options=Options(offload=…); '
    """
    advice = ""
    for parameter, kind in annotations.items():
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            fields = {each.name for each in dataclasses.fields(kind)}
            for keyword in (each for each in keywords if each in fields):
                advice += (f"{keyword} is a field of {parameter}, pass "
                           f"{parameter}={kind.__name__}({keyword}=…); ")
    return advice


def fits(value: object, annotation: Any) -> bool:
    """Says whether a value, and each element of a list, tuple, set or mapping, has the annotated type.

    A ``bool`` is no number, for it seldom is meant as one.

    >>> fits([1, "a"], list[int | str]), fits(True, int), fits(3, float), fits("gptq", tuple[str, ...])
    (True, False, True, False)
    """
    if type(annotation) is type and annotation not in ABSTRACT:
        return isinstance(value, annotation)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is None or annotation is type(None):
        return value is None
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, each) for each in arguments)
    if origin is typing.Literal:
        return any(type(value) is type(each) and value == each for each in arguments)
    if origin is typing.Annotated:
        return fits(value, arguments[0])
    if annotation in ABSTRACT:
        return isinstance(value, ABSTRACT[annotation]) and not isinstance(value, bool)
    kind = origin or annotation
    if not isinstance(kind, type):
        return True  # Any, a type variable
    try:
        if not isinstance(value, kind):
            return False
    except TypeError:
        return True  # a protocol that cannot be checked while running
    if not arguments or origin is collections.abc.Callable:
        return True
    if isinstance(value, Mapping):
        return all(fits(key, arguments[0]) for key in value) and (
            len(arguments) < 2 or all(fits(item, arguments[1]) for item in value.values())
        )
    if kind is tuple and isinstance(value, tuple) and arguments[-1] is not ...:
        return len(value) == len(arguments) and all(map(fits, value, arguments))
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(fits(item, arguments[0]) for item in value)
    return True


def _text(annotation: Any) -> str:
    """An annotation in words, with the article of the first."""
    words = _words(annotation)
    return words if words.startswith(("one of", "None")) else f"{'an' if words[0] in 'aeioAEIO' else 'a'} {words}"


def _words(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in (None, type(None)):
        return "None"
    if origin in (typing.Union, types.UnionType):
        words = list(dict.fromkeys(map(_words, arguments)))
        return f"{', '.join(words[:-1])} or {words[-1]}" if words[1:] else words[0]
    if origin is typing.Literal:
        return f"one of {', '.join(map(repr, arguments))}"
    if origin is typing.Annotated:
        return _words(arguments[0])
    if origin is collections.abc.Callable:
        return "function"
    if origin is os.PathLike or annotation is os.PathLike:
        return "path"
    if origin is not None:
        elements = " to ".join(_words(each) for each in arguments if each not in (..., Any, object))
        return f"{_name(origin)} of {elements}" if elements else _name(origin)
    return _name(annotation)


def _name(kind: Any) -> str:
    name: str = getattr(kind, "__name__", str(kind))
    return name.lower() if getattr(kind, "__module__", "") in ("typing", "collections.abc") else name


def _repr(value: object) -> str:
    """A short text of a value, however large or deeply nested it is."""
    if isinstance(value, (torch.Tensor, torch.nn.Module)):
        return f"a {type(value).__name__}"
    text = reprlib.Repr()
    text.maxlevel = 2
    try:
        return text.repr(value)
    except ValueError:  # an int of more digits than Python writes
        return f"a {type(value).__name__}"


def _shown(signature: inspect.Signature) -> str:
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for name, parameter in signature.parameters.items()
             if name not in ("self", "cls")]
    return str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))


def raised_by_us(error: BaseException) -> str | None:
    """File and line where qtk's own code raised an error, or called a library that did; ``None`` if other code did.

    Code of a model is other code, qtk's modules and captured graphs too.
    """
    place = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        name, code = str(frame.f_globals.get("__name__", "")), frame.f_code
        package = name.partition(".")[0]
        is_graph = GRAPH_FILE in code.co_filename or code.co_filename == BOUND_FILE
        if code in MODEL_CODE or name.startswith(MODEL_PACKAGE) or is_graph:
            place = None
        elif package == "qtk":
            if place is None and code.co_name == "__getattr__":
                return None  # other code reads an attribute that is not there
            file = code.co_filename
            place = f"{os.path.join('qtk', file.rpartition(f'{os.sep}qtk{os.sep}')[2])}:{line}"
        elif package not in LIBRARIES and package:
            place = None
    return place


class RejectsUnknownAttributes:
    """Refuses to set attributes that nothing would read: arguments of the constructor, and unknown names.

    >>> class Circle(RejectsUnknownAttributes):
    ...     def __init__(self, radius: float) -> None:
    ...         self.radius = radius
    >>> circle = Circle(radius=1.0)
    >>> circle.radius = 2.0  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    qtk.errors.ConfigError: setting 'radius' would have no effect: it is settled when the Circle is made; make ...
    >>> circle.diameter = 2.0
    Traceback (most recent call last):
    qtk.errors.ConfigError: setting 'diameter' would have no effect: Circle has no such attribute; it has radius

    Properties with a setter, private and annotated attributes are set as usual.
    """

    def __setattr__(self, name: str, value: object) -> None:
        """Raises: ConfigError if the attribute is settled, or unknown."""
        reason = None if name.startswith("_") else self._why_not(name)
        if reason is not None:
            raise ConfigError(f"setting {name!r} would have no effect: {reason}")
        super().__setattr__(name, value)

    def _why_not(self, name: str) -> str | None:
        """Says why an attribute cannot be set; ``None`` if it can."""
        kind = type(self)
        above = [each for each in kind.__mro__
                 if issubclass(each, RejectsUnknownAttributes) and each is not RejectsUnknownAttributes]
        parameters = {each: None for base in above for each in inspect.signature(base).parameters}
        member = getattr(kind, name, None)
        if isinstance(member, property) or any(name in inspect.get_annotations(base) for base in above):
            return None
        if name in parameters:
            is_first = name not in self.__dict__
            return None if is_first else (f"it is settled when the {kind.__name__} is made; make a new one, "
                                          f"{kind.__name__}(…, {name}=…)")
        if member is not None:
            return f"it is a method of {kind.__name__}; call it"
        known = ", ".join(each for each in parameters if each in vars(self))
        return f"{kind.__name__} has no such attribute; it has {known}"
