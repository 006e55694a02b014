"""The names of a prepared model's inputs and outputs."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, fx

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
