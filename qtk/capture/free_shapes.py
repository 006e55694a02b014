"""Which axes of a call's tensors a capture asks ``torch.export`` to free."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.export import Dim, ShapesCollection

from qtk.calls.calls import Call, detached
from qtk.calls.inputs import is_free
from qtk.calls.served_sizes import Axis
from qtk.capture.prepared_model import PreparedGraph
from qtk.capture.restored import restored
from qtk.errors import OUT_OF_MEMORY, CaptureError
from qtk.torch_private import pytree

Shapes: TypeAlias = "Mapping[str, Shapes] | Mapping[int, object] | tuple[Shapes, ...] | list[Shapes] | None"
"""Dynamic shapes, nested like the inputs; a tensor has axis → a name, ``Dim``, ``Dim.AUTO``, a size, or ``None``:
fixed."""

DynamicShapes: TypeAlias = (
    Literal["batch", "all"] | Mapping[str, Shapes] | tuple[Shapes, ...] | list[Shapes] | ShapesCollection | None
)
"""Which sizes may vary. ``"batch"``: axis 0 of every tensor, and the axes that must be as long; ``"all"``: every axis;
``None``: none; else as in ``torch.export``, or with names: ``{"x": {0: "batch", 1: "frames"}, "h": {1: "batch"}}``."""

LeafAxis: TypeAlias = tuple[int, int]
"""The number of a leaf among the arguments of a call, and one of its axes."""


def check_dynamic_shapes(dynamic_shapes: DynamicShapes) -> None:
    """Checks the type of ``dynamic_shapes``. Raises: CaptureError if it is not in ``DynamicShapes``."""
    if isinstance(dynamic_shapes, str):
        known = dynamic_shapes in ("batch", "all")
    else:
        known = dynamic_shapes is None or isinstance(dynamic_shapes, (Mapping, tuple, list, ShapesCollection))
    if not known:
        raise CaptureError(
            f"dynamic_shapes is {dynamic_shapes!r}; give 'batch', 'all', None, or what torch.export takes: a dict of "
            "shapes by argument, or a tuple of them"
        )


def with_batch_of_two(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Doubles a batch of 1, which ``torch.export`` takes for a constant, if the model runs on two samples.

    It is axis 0 of every tensor in which that has length 1; if the model does not run so, the first axis of length 1
    of the others too, as the states of recurrent nets have it. A model whose buffers take another shape by it holds a
    batch of its own. Its state stays as it was.
    """
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.ndim]
    if all(tensor.shape[0] != 1 for tensor in tensors):
        return args, kwargs
    ways = [{id(tensor): 0 for tensor in tensors if tensor.shape[0] == 1},
            {id(tensor): [*tensor.shape].index(1) for tensor in tensors if 1 in tensor.shape}]
    for axes in ways if ways[0] != ways[1] else ways[:1]:
        doubled: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(
            lambda leaf, axes=axes: torch.cat([leaf, leaf], axes[id(leaf)]) if id(leaf) in axes else leaf,
            (args, kwargs),
        )
        shapes = [buffer.shape for buffer in model.buffers()]
        try:
            with restored(model), torch.no_grad():
                model(*detached(doubled[0]), **detached(doubled[1]))
                if [buffer.shape for buffer in model.buffers()] != shapes:
                    continue
        except OUT_OF_MEMORY:
            raise
        except Exception:  # whatever the model raises on two samples
            continue
        return doubled
    return args, kwargs


def free_shapes(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], is_asked: Callable[[LeafAxis], bool]
) -> DynamicShapes:
    """Dynamic shapes by argument name in which the axes of tensors that are asked for may vary."""
    bound = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    numbers = leaf_numbers(args, kwargs)

    def free(leaf: object) -> dict[int, Any] | None:
        if not isinstance(leaf, Tensor) or not leaf.ndim:
            return None
        return dict.fromkeys((axis for axis in range(leaf.ndim) if is_asked((numbers[id(leaf)], axis))), Dim.AUTO)

    shapes: DynamicShapes = shapes_like(bound, free)
    return shapes


def shapes_from_json(stored: Any) -> Any:
    """Dynamic shapes as they were before they were JSON, whose keys are texts.

    >>> shapes_from_json({"x": {"0": "batch"}}), shapes_from_json("all")
    ({'x': {0: 'batch'}}, 'all')
    """
    if not isinstance(stored, Mapping):
        return stored
    return {name: {int(axis): length for axis, length in axes.items()} for name, axes in stored.items()}


def shapes_like(tree: Any, shape_of: Callable[[object], object]) -> Any:
    """``shape_of`` each leaf, nested as ``torch.export`` wants it: of a registered class, its children in a list."""
    children, structure = pytree.tree_flatten(tree, is_leaf=lambda value: value is not tree)
    if structure.is_leaf():
        return shape_of(tree)
    shapes = [shapes_like(child, shape_of) for child in children]
    return pytree.tree_unflatten(shapes, structure) if structure.type in pytree.BUILTIN_TYPES else shapes


def token_axes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Collection[LeafAxis]:
    """Axis 1 of each integer input [batch, tokens, …], and of the tensors in which it is as long."""
    tensors = [(number, leaf) for number, leaf in enumerate(pytree.tree_leaves((args, dict(kwargs))))
               if isinstance(leaf, Tensor) and leaf.ndim > 1]
    lengths = {leaf.shape[1] for _, leaf in tensors if leaf.dtype in (torch.int32, torch.int64)}
    return {(number, 1) for number, leaf in tensors if leaf.shape[1] in lengths}


def leaf_numbers(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[int, int]:
    """Identity of a leaf → its number among the leaves of the arguments."""
    return {id(leaf): number for number, leaf in enumerate(pytree.tree_leaves((args, dict(kwargs))))}


def batch_elsewhere(
    inputs: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Collection[LeafAxis]:
    """Axes that hold a batch fixed: they are not 0, and as long as an axis 0 that was asked to be free and is not.

    Args:
        inputs: name → fake tensor of each input of a program in which axis 0 of every input was asked to be free.
        args: positional arguments it was exported with.
        kwargs: keyword arguments.

    Returns: none if axis 0 of the first input is free, as it should be, and so are lengths of sequences [batch].
    """
    tensors = [value for value in inputs.values() if value.ndim]
    fixed = {int(value.shape[0]) for value in tensors if not is_free(value.shape[0]) and int(value.shape[0]) > 1}
    if all(is_free(value.shape[0]) for index, value in enumerate(tensors) if index == 0 or value.ndim == 1):
        return ()
    leaves = pytree.tree_leaves((args, dict(kwargs)))
    return {(number, axis) for number, leaf in enumerate(leaves) if isinstance(leaf, Tensor)
            for axis, length in enumerate(leaf.shape) if axis and length in fixed}


def named_axes(
    dynamic_shapes: object, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[LeafAxis, str]]:
    """Explicit dynamic shapes with ``Dim.AUTO`` in place of each name, and the names of axes.

    Arguments that are left out are fixed, if any axis has a name; without names the shapes are torch's own.

    Raises: CaptureError if an argument or an axis does not exist, or two axes of one name differ in length.
    """
    bound = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    if isinstance(dynamic_shapes, ShapesCollection) or not any(
        isinstance(leaf, str) for leaf in pytree.tree_leaves(dynamic_shapes)
    ):
        return dynamic_shapes, {}
    shapes = dynamic_shapes if isinstance(dynamic_shapes, Mapping) else dict(
        zip(bound, _items(dynamic_shapes), strict=False))
    unknown = [name for name in shapes if name not in bound]
    if unknown:
        raise CaptureError(f"dynamic_shapes names {unknown[0]!r}, and the arguments of the call are {[*bound]}")
    numbers = leaf_numbers(args, kwargs)
    names: dict[LeafAxis, str] = {}
    lengths: dict[str, tuple[str, int]] = {}

    def torchs(shape: Any, value: Any, place: str) -> Any:
        """The shape of one argument, nested like ``value``, as torch takes it."""
        if shape is None:
            return shapes_like(value, lambda _: None)
        if isinstance(value, Mapping):
            return {key: torchs(shape.get(key), item, f"{place}[{key!r}]") for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(torchs(each, item, f"{place}[{index}]")
                               for index, (each, item) in enumerate(zip(shape, value, strict=True)))
        if not isinstance(value, Tensor):
            return None
        of_axes = dict(shape if isinstance(shape, Mapping) else enumerate(shape))
        for axis, name in of_axes.items():
            if axis not in range(value.ndim):
                raise CaptureError(f"dynamic_shapes has axis {axis} of {place}, whose axes are 0 to {value.ndim - 1}")
            if isinstance(name, str):
                text, length = f"{place}.shape[{axis}]", value.shape[axis]
                other, its_length = lengths.setdefault(name, (text, length))
                if length != its_length:
                    raise CaptureError(f"dynamic_shapes calls both {other} and {text} {name!r}, which are {its_length} "
                                       f"and {length} in the example; give each length a name of its own")
                of_axes[axis], names[numbers[id(value)], axis] = Dim.AUTO, name
        return of_axes

    return {name: torchs(shapes.get(name), value, name) for name, value in bound.items()}, names


def _items(shapes: object) -> Collection[object]:
    assert isinstance(shapes, (list, tuple))
    return shapes


def refuse_unfree_names(
    names: Mapping[LeafAxis, str], sizes: Mapping[LeafAxis, object], texts: Mapping[int, str]
) -> None:
    """Compares the names of axes with the sizes that capture gave them.

    Args:
        names: axis → name.
        sizes: axis → its size in the captured program.
        texts: number of a leaf → the name of the input.

    Raises: CaptureError if a named axis is fixed, or two names are one size.
    """
    name_of: dict[str, str] = {}
    for axis, name in names.items():
        text = f"{texts[axis[0]]}.shape[{axis[1]}]"
        if not is_free(sizes[axis]):
            why = ("an axis of length 1 in the example stays so; give one of 2 or more" if sizes[axis] == 1 else
                   "the code of the model fixes it; leave its name out")
            raise CaptureError(f"dynamic_shapes calls {text} {name!r}, and it is {sizes[axis]} in the graph: {why}")
        other = name_of.setdefault(str(sizes[axis]), name)
        if other != name:
            raise CaptureError(f"dynamic_shapes calls {text} {name!r}, and in the code of the model it is as long as "
                               f"what is called {other!r}; give both one name")


def names_by_input(graph: PreparedGraph, call: Call, names: Mapping[LeafAxis, str]) -> dict[Axis, str]:
    """The names of axes by the inputs of ``graph``, which was captured with ``call``."""
    numbers = leaf_numbers(call.args, call.kwargs)
    leaves = zip(graph.graph.find_nodes(op="placeholder"), graph.leaves(call.args, call.kwargs), strict=True)
    inputs = {numbers[id(leaf)]: str(node.target) for node, leaf in leaves if isinstance(leaf, Tensor)}
    return {(inputs[number], axis): name for (number, axis), name in names.items()}
