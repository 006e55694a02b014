"""The inputs of a model: how a batch becomes arguments, and which arguments a captured graph accepts."""

from __future__ import annotations

import inspect
from collections import defaultdict, namedtuple
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from qtk.calls.calls import Call
from qtk.calls.served_sizes import ServedSizes, axis_text
from qtk.errors import CaptureError
from qtk.public import runs_model
from qtk.torch_private import call_structure, flatten_as, pytree

ExampleInputs: TypeAlias = Tensor | tuple[Any, ...] | Mapping[str, Any]
"""One tensor, a tuple of positional arguments, or a mapping of keyword arguments."""

_ANY = ServedSizes()

VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def split_inputs(batch: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments that a tensor, tuple, list, mapping or ``Call`` is passed as.

    Raises: CaptureError for any other type.
    """
    match batch:
        case Call(args, kwargs):
            return args, kwargs
        case Tensor():
            return (batch,), {}
        case tuple() | list():
            return tuple(batch), {}
        case Mapping():
            return (), dict(batch)
    raise CaptureError(f"example_inputs must be a tensor, a tuple or a dict, got {type(batch).__name__}")


@runs_model
def as_captured(
    graph: fx.Graph, signature: inspect.Signature | None, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Rebinds the arguments of a call to the names that ``graph`` was captured with, in its order.

    An argument that was omitted at capture may be passed if it is the default, and the other way round.

    Args:
        graph: the graph.
        signature: of the ``forward`` it was captured from.
        args: positional arguments.
        kwargs: keyword arguments.

    Raises: TypeError as ``forward`` would; CaptureError if an argument that was not captured is not its default.
    """
    info = call_structure(graph)
    if info is None or signature is None:
        return args, dict(kwargs)
    names = [name for name in info.orig_args if name != "self"]
    positional = info.in_spec.child(0).num_children
    if len(args) == positional and kwargs.keys() == {*names[positional:]}:
        return args, dict(kwargs)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = _by_name(bound)
    if arguments is None:
        return args, dict(kwargs)
    for name, value in arguments.items():
        if name not in signature.parameters:
            if name not in names:
                raise CaptureError(f"input {name} was not given when the model was captured; leave it out, or prepare "
                                   "the model again with that argument")
            continue
        default = signature.parameters[name].default
        if name not in names and value is not default and not (_plain(value) and value == default):
            raise CaptureError(
                f"input {name} was not given when the model was captured, and its default {default!r} is written into "
                "the graph; prepare the model again with that argument, or with a call that has it among the variants"
            )
    missing = [name for name in names if name not in arguments]
    if missing:
        raise CaptureError(f"input {missing[0]} was given when the model was captured, and is left out; pass it, or "
                           "prepare the model again without, or with a call without it among the variants")
    values = [arguments[name] for name in names]
    return tuple(values[:positional]), dict(zip(names[positional:], values[positional:], strict=True))


def _by_name(bound: inspect.BoundArguments) -> dict[str, object] | None:
    """All arguments by name, also what ``**kwargs`` holds; ``None`` if some have none, being of ``*args``."""
    arguments: dict[str, object] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL and value:
            return None
        if kind not in VARIADIC:
            arguments[name] = value
        elif isinstance(value, Mapping):
            arguments |= value
    return arguments


def check_inputs(
    graph: fx.Graph, args: tuple[object, ...], kwargs: Mapping[str, object], sizes: ServedSizes = _ANY
) -> None:
    """Compares the arguments of a call with the arguments ``graph`` was captured for.

    A captured graph has sizes and constants written into it; with others it would compute a wrong result, or fail
    far from the cause. Arguments that do not bind to ``forward`` are left to Python's own error.

    Args:
        graph: the graph.
        args: positional arguments.
        kwargs: keyword arguments.
        sizes: what else is known of the graph's sizes.

    Raises: CaptureError naming the input, its value and the value at capture.
    """
    leaves = leaves_of_call(graph, args, kwargs)
    placeholders = graph.find_nodes(op="placeholder")
    if leaves is None or len(leaves) != len(placeholders):
        return
    for node, value in zip(placeholders, leaves, strict=True):
        captured = node.meta.get("val", value)
        if isinstance(captured, Tensor) and isinstance(value, Tensor):
            _check_shape(str(node.target), value.shape, captured.shape, sizes)
            _check_kind(node.target, value.dtype, captured.dtype)
        elif isinstance(captured, Tensor):
            raise CaptureError(
                f"input {node.target} is {value!r}, the model was captured with a tensor; prepare it again with that "
                "value"
            )
        elif isinstance(captured, (bool, int, float, str, type(None))) and not (_plain(value) and value == captured):
            what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise CaptureError(
                f"input {node.target} is {what}, and {captured!r} is written into the captured graph; "
                "prepare the model again with that value"
            )
    sizes.check_call({str(node.target): leaf for node, leaf in zip(placeholders, leaves, strict=True)})


def unequal_axes(graph: fx.Graph, leaves: Sequence[object]) -> str | None:
    """Two axes of one free size that have two lengths in a call, as text; ``None`` if there are none.

    Args:
        graph: the graph.
        leaves: the leaves of the call, in the order of the placeholders.
    """
    first: dict[str, tuple[str, int]] = {}
    for node, leaf in zip(graph.find_nodes(op="placeholder"), leaves, strict=False):
        captured = node.meta.get("val")
        if not isinstance(leaf, Tensor) or not isinstance(captured, Tensor):
            continue
        for axis, (size, length) in enumerate(zip(captured.shape, leaf.shape, strict=False)):
            place = axis_text((str(node.target), axis))
            other, before = first.setdefault(str(size), (place, length)) if is_free(size) else (place, length)
            if length != before:
                return f"{other} is {before} and {place} is {length}"
    return None


def is_free(size: object) -> bool:
    """Says whether a size of a captured tensor may vary."""
    return isinstance(size, torch.SymInt) and size.node.maybe_as_int() is None


def input_leaves(graph: fx.Graph, args: tuple[object, ...], kwargs: Mapping[str, object]) -> list[object]:
    """The arguments of a call, flat, in the order of the placeholders of ``graph``.

    Raises: CaptureError if their number or nesting differs from the inputs the model was prepared with.
    """
    names = [str(node.target) for node in graph.find_nodes(op="placeholder")]
    passed = pytree.tree_leaves((args, dict(kwargs)))
    leaves = passed if call_structure(graph) is None else leaves_of_call(graph, args, kwargs)
    if leaves is None or not len(passed) == len(leaves) == len(names):
        raise CaptureError(
            f"the model was prepared with {len(names)} inputs ({', '.join(names)}), got {len(passed)}, or nested "
            "otherwise; pass inputs of that kind"
        )
    return leaves


def leaves_of_call(
    graph: fx.Graph, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> list[object] | None:
    """The leaves of a call in the order of the placeholders; ``None`` if they are nested otherwise, or flat."""
    info = call_structure(graph)
    if info is None:
        return None
    names = [name for name in info.orig_args if name != "self"]
    bound = {**dict(zip(names, args, strict=False)), **kwargs}
    positional = info.in_spec.child(0).num_children
    try:
        structure = [bound[name] for name in names[:positional]], {name: bound[name] for name in names[positional:]}
    except KeyError:
        return None
    by_position, by_name = info.in_spec.children()
    specs = [*zip(names, by_position.children(), strict=False), *zip(by_name.context, by_name.children(), strict=True)]
    for name, spec in specs:
        _check_nesting(name, bound[name], spec)
    try:
        return flatten_as(structure, info.in_spec)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, RuntimeError):
        return None


def _check_nesting(name: str, value: object, spec: pytree.TreeSpec) -> None:
    """Checks that lists and dicts have the length and the keys they had at capture.

    Raises: CaptureError naming the input.
    """
    if spec.is_leaf():
        return
    kind = spec.context if spec.type is namedtuple else spec.type
    if isinstance(value, Mapping) and issubclass(kind, Mapping):
        keys = list(spec.context[1] if kind is defaultdict else spec.context)
        missing, extra = [key for key in keys if key not in value], [key for key in value if key not in keys]
        if missing or extra:
            raise CaptureError(
                f"input {name} has the keys {[*value]}, the model was captured for {keys}; prepare it again with such "
                "an input"
            )
        children = [(f"{name}[{key!r}]", value[key]) for key in keys]
    elif isinstance(value, (list, tuple)) and issubclass(kind, (list, tuple)):
        if len(value) != spec.num_children:
            raise CaptureError(
                f"input {name} has {len(value)} items, the model was captured for {spec.num_children}; prepare it "
                "again with such an input"
            )
        children = [(f"{name}[{index}]", item) for index, item in enumerate(value)]
    elif isinstance(value, (Tensor, Mapping, list, tuple)) or _plain(value):
        raise CaptureError(f"input {name} is a {type(value).__name__}, the model was captured for a {kind.__name__}")
    else:
        children = [*zip(*_registered_children(name, value, spec), strict=True)]
    for (path, item), item_spec in zip(children, spec.children(), strict=True):
        _check_nesting(path, item, item_spec)


def _registered_children(name: str, value: object, spec: pytree.TreeSpec) -> tuple[list[str], list[object]]:
    """The names and values of what an instance of a registered class holds. Raises: CaptureError naming the input."""
    kind, captured = type(value), spec.type
    if captured is not kind or kind not in pytree.SUPPORTED_NODES:
        raise CaptureError(f"input {name} is a {kind.__name__}, the model was captured for a "
                           f"{getattr(captured, '__name__', captured)}; prepare it again with such an input, or with "
                           "one in variants")
    children, context = pytree.SUPPORTED_NODES[kind].flatten_fn(value)
    items = [*children]
    difference = None if _is_alike(spec.context, context) else _context_difference(spec.context, context)
    if difference is None and len(items) != spec.num_children:
        difference = f"{len(items)} values", f"{spec.num_children}"
    if difference is not None:
        raise CaptureError(f"input {name} has {difference[0]}, the model was captured for {difference[1]}, which is "
                           "written into the graph; prepare it again with such an input, or with one in variants")
    return [f"{name}.{index}" for index in range(len(items))], items


def _is_alike(captured: object, value: object) -> bool:
    """Says whether two contexts are equal but for devices and dtypes, which may change."""
    if isinstance(captured, (torch.device, torch.dtype)):
        return type(captured) is type(value)
    if isinstance(captured, Mapping) and isinstance(value, Mapping):
        if captured.get("_t") in ("device", "dtype"):
            return bool(captured["_t"] == value.get("_t"))
        return captured.keys() == value.keys() and all(_is_alike(each, value[key]) for key, each in captured.items())
    if isinstance(captured, (list, tuple)) and isinstance(value, (list, tuple)):
        return len(captured) == len(value) and all(map(_is_alike, captured, value))
    return bool(captured == value)


def _context_difference(captured: object, value: object, name: str = "content") -> tuple[str, str]:
    """The first difference of what a registered class holds beside tensors: as it is, and as it was captured."""
    if isinstance(captured, Mapping) and isinstance(value, Mapping) and captured.keys() == value.keys():
        pairs = [(str(key), captured[key], value[key]) for key in captured]
    elif isinstance(captured, (list, tuple)) and isinstance(value, (list, tuple)) and len(captured) == len(value):
        pairs = [(name, *pair) for pair in zip(captured, value, strict=True)]
    else:
        return f"{name} {value!r:.80}", f"{captured!r:.80}"
    return next(_context_difference(before, after, name if key.startswith("_") or len(key) == 1 else key)
                for key, before, after in pairs if not _is_alike(before, after))


def _check_shape(name: str, shape: torch.Size, captured: torch.Size, sizes: ServedSizes) -> None:
    fixed = [(axis, int(size)) for axis, size in enumerate(captured) if not is_free(size)]
    if len(shape) == len(captured) and all(shape[axis] == size for axis, size in fixed):
        return
    needed = ", ".join("any" if is_free(size) else str(int(size)) for size in captured)
    if len(shape) != len(captured):
        way = "prepare it again with such an input"
    else:
        way = sizes.remedy(*next(((name, axis), size) for axis, size in fixed if shape[axis] != size))
    raise CaptureError(f"input {name} has shape {tuple(shape)}, the model was captured for ({needed}); {way}")


def _check_kind(name: object, dtype: torch.dtype, captured: torch.dtype) -> None:
    """Floats stay floats, whatever their width, and integers, which may be indices or images, stay integers."""
    if dtype.is_floating_point == captured.is_floating_point and dtype.is_complex == captured.is_complex:
        return
    given, wanted = (str(each).removeprefix("torch.") for each in (dtype, captured))
    advice = "or scale to [0, 1]" if dtype == torch.uint8 else "or prepare it again with such an input"
    raise CaptureError(f"input {name} is {given}, the model was captured for {wanted}: convert, {advice}")


def _plain(value: object) -> bool:
    return isinstance(value, (bool, int, float, str, type(None)))
