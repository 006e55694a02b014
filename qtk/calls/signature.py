"""The names of a prepared model's inputs and outputs, and the kinds of its calls.

The kind of a call: which inputs are given, and what they are but their sizes and numbers. A graph serves one kind.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Hashable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn

from qtk.torch_private import call_structure, pytree


def input_nodes(model: fx.GraphModule) -> dict[str, fx.Node]:
    """Path → node of every tensor that the model takes: ``x``, or ``past.0.1`` inside a nested argument."""
    nodes = model.graph.find_nodes(op="placeholder")
    structure, arguments = call_structure(model.graph), {str(node.target): node for node in nodes}
    if structure is not None:
        args, kwargs = pytree.tree_unflatten(_stand_ins(nodes), structure.in_spec)
        names = [name for name in structure.orig_args if name != "self"]
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    return {_dotted(path): node for path, node in zip(leaf_paths(arguments), nodes, strict=True)
            if isinstance(node.meta.get("val"), Tensor)}


def input_names(model: fx.GraphModule) -> list[str]:
    """Names of all inputs, tensors or not."""
    return [str(node.target) for node in model.graph.find_nodes(op="placeholder")]


def output_nodes(model: fx.GraphModule) -> dict[str, fx.Node]:
    """Name → node of every returned tensor: ``logits``, ``hidden.0``; ``output_0`` in a tuple, ``output`` alone.

    The second of two equal names (of the key ``"a.b"``, and ``"b"`` inside ``"a"``) gets the suffix ``_1``.
    """
    structure = call_structure(model.graph)
    values = returned = model.graph.output_node().args[0]
    leaves = pytree.tree_leaves(values)
    if structure is not None and structure.out_spec is not None:
        returned = pytree.tree_unflatten(_stand_ins(leaves), structure.out_spec)
    nodes: dict[str, fx.Node] = {}
    for path, value in zip(leaf_paths(returned), leaves, strict=True):
        if isinstance(value, fx.Node) and isinstance(value.meta.get("val"), Tensor):
            name, ordinal = _path_name(path), 0
            while (unique := f"{name}_{ordinal}" if ordinal else name) in nodes:
                ordinal += 1
            nodes[unique] = value
    return nodes


def values_of(model: fx.GraphModule, dtype: torch.dtype) -> list[str]:
    """Names of the inputs and the outputs that are tensors of a dtype."""
    named = [(str(node.target), node) for node in model.graph.find_nodes(op="placeholder")] + [
        *output_nodes(model).items()
    ]
    return [name for name, node in named if isinstance(value := node.meta.get("val"), Tensor) and value.dtype is dtype]


def _stand_ins(leaves: Collection[object]) -> list[Tensor]:
    """Empty tensors in place of nodes, for containers that hold nothing but tensors."""
    return [torch.empty(0) for _ in leaves]


def leaf_paths(tree: object) -> list[pytree.KeyPath]:
    """The path to each leaf; in a class that is registered without keys, by the number of the leaf."""
    paths: list[pytree.KeyPath] = []
    for path, value in pytree.tree_flatten_with_path(tree, is_leaf=_has_no_keys)[0]:
        inside = pytree.tree_leaves(value) if _has_no_keys(value) else None
        paths += [path] if inside is None else [(*path, pytree.SequenceKey(index)) for index, _ in enumerate(inside)]
    return paths


def _has_no_keys(value: object) -> bool:
    node = pytree.SUPPORTED_NODES.get(type(value))
    return node is not None and node.flatten_with_keys_fn is None


def _path_name(path: pytree.KeyPath) -> str:
    name = _dotted(path)
    return f"output_{name}" if name[:1].isdigit() else name or "output"


def _dotted(path: pytree.KeyPath) -> str:
    parts = []
    for key in path:
        match key:
            case pytree.MappingKey():
                parts.append(str(key.key))
            case pytree.GetAttrKey():
                parts.append(key.name)
            case pytree.SequenceKey():
                parts.append(str(key.idx))
    return ".".join(parts)


Kind: TypeAlias = Hashable
"""Equal for calls that one graph can serve, as far as it serves their sizes."""


def signature_of(module: nn.Module) -> inspect.Signature | None:
    """The signature of ``forward``; ``None`` if it has none, as code that is no Python."""
    try:
        return inspect.signature(module.forward)
    except (TypeError, ValueError):
        return None


def call_kind(signature: inspect.Signature | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Kind:
    """The kind of a call, however it is written: by position or by name, with defaults given or left out.

    >>> import torch
    >>> def forward(x, labels=None, scale=1.0): ...
    >>> signature, x = inspect.signature(forward), torch.ones(2, 3)
    >>> call_kind(signature, (x, None), {}) == call_kind(signature, (), {"scale": 1.0, "x": torch.ones(4, 7)})
    True
    >>> call_kind(signature, (x,), {}) == call_kind(signature, (x, torch.tensor([1, 0])), {})
    False

    Float dtypes are one, so that it survives ``model.half()``.
    """
    given = _given(signature, args, kwargs)
    return tuple((name, _kind_of(given[name])) for name in sorted(given))


def _given(signature: inspect.Signature | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Name → argument, where it is not the default; what ``*args`` takes is named by its position."""
    parameters = {} if signature is None else signature.parameters
    names = [name for name, parameter in parameters.items()
             if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)]
    names += [f"*{index}" for index in range(len(names), len(args))]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return {name: value for name, value in given.items()
            if name not in parameters or not _is(value, parameters[name].default)}


def _is(value: object, default: object) -> bool:
    return value is default or (type(value) is type(default) and is_plain(value) and value == default)


def is_plain(value: object) -> bool:
    """Says whether a value is a constant of the code that is captured."""
    return isinstance(value, (bool, int, float, str, type(None)))


def _kind_of(value: Any) -> Kind:
    if isinstance(value, Tensor):
        return "float" if value.is_floating_point() else str(value.dtype), value.ndim
    if is_plain(value):
        return type(value).__name__, value
    if isinstance(value, Mapping):
        return tuple((str(key), _kind_of(value[key])) for key in sorted(value, key=str))
    if isinstance(value, (list, tuple)):
        return tuple(_kind_of(item) for item in value)
    leaves, structure = pytree.tree_flatten(value)
    return repr(value) if len(leaves) == 1 and leaves[0] is value else (str(structure), *map(_kind_of, leaves))
