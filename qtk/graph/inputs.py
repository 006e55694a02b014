"""What a prepared model may be called with: the shapes and constants it was captured for."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, fx
from torch.fx import _pytree as fx_pytree
from torch.fx.graph import _PyTreeInfo

from qtk.errors import CaptureError


def check_inputs(graph: fx.Graph, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
    """Compares the arguments of a call with those ``graph`` was captured for.

    A captured graph has sizes and constants written into it; with others it would compute something else, or fail
    far from the cause. Calls that bind otherwise are left to Python's own error.

    Raises: CaptureError naming the input, what it is and what it must be.
    """
    leaves = _leaves(graph, args, kwargs)
    placeholders = graph.find_nodes(op="placeholder")
    if leaves is None or len(leaves) != len(placeholders):
        return
    for node, value in zip(placeholders, leaves, strict=True):
        captured = node.meta.get("val", value)
        if isinstance(captured, Tensor):
            if isinstance(value, Tensor):
                _check_shape(node.target, value.shape, captured.shape)
        elif isinstance(captured, (bool, int, float, str, type(None))) and _plain(value) and value != captured:
            raise CaptureError(
                f"input {node.target} is {value!r}, and {captured!r} is written into the captured graph; "
                "prepare the model again with that value"
            )


def is_free(size: object) -> bool:
    """Whether a size of a captured tensor may vary."""
    return isinstance(size, torch.SymInt) and size.node.maybe_as_int() is None


def _leaves(graph: fx.Graph, args: tuple[object, ...], kwargs: Mapping[str, object]) -> list[object] | None:
    """The arguments in the order of the placeholders, as the generated ``forward`` binds them."""
    info = getattr(graph._codegen, "pytree_info", None)
    if not isinstance(info, _PyTreeInfo):
        return None
    names = [name for name in info.orig_args if name != "self"]
    bound = {**dict(zip(names, args, strict=False)), **kwargs}
    positional = info.in_spec.child(0).num_children
    try:
        structure = [bound[name] for name in names[:positional]], {name: bound[name] for name in names[positional:]}
        return list(fx_pytree.tree_flatten_spec(structure, info.in_spec))
    except (TypeError, ValueError, KeyError, IndexError, AttributeError):
        return None


def _check_shape(name: object, given: torch.Size, captured: torch.Size) -> None:
    fixed = [(axis, int(size)) for axis, size in enumerate(captured) if not is_free(size)]
    if len(given) == len(captured) and all(given[axis] == size for axis, size in fixed):
        return
    needed = ", ".join("any" if is_free(size) else str(int(size)) for size in captured)
    raise CaptureError(
        f"input {name} has shape {tuple(given)}, the model was captured for ({needed}); prepare it again with such an "
        "input, or name the axes that vary in dynamic_shapes"
    )


def _plain(value: object) -> bool:
    return isinstance(value, (bool, int, float, str, type(None)))
