"""The ladder of captures: torch.export, then torch.fx before torch.export."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from qtk.errors import CaptureError

ExampleInputs: TypeAlias = Tensor | tuple[Any, ...] | Mapping[str, Any]
"""One tensor, a tuple of positional arguments, or a mapping of keyword arguments."""

DynamicShapes: TypeAlias = Any
"""``"batch"``: dimension 0 of every tensor may vary; ``None``: nothing may; or what ``torch.export`` takes."""


@dataclass(frozen=True, slots=True)
class Capture:
    """An exported program and how it was reached."""

    program: ExportedProgram
    rung: str
    dynamic: bool
    reasons: tuple[str, ...]


def split_inputs(example_inputs: ExampleInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments. Raises: CaptureError for any other type."""
    match example_inputs:
        case Tensor():
            return (example_inputs,), {}
        case tuple() | list():
            return tuple(example_inputs), {}
        case Mapping():
            return (), dict(example_inputs)
    raise CaptureError(f"example_inputs must be a tensor, a tuple or a dict, got {type(example_inputs).__name__}")


def capture(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: DynamicShapes
) -> Capture:
    """Exports ``model``, which must be in eval mode; the first rung that holds wins.

    Raises: CaptureError with the reason of every rung.
    """
    reasons: list[str] = []
    for rung in ("export", "fx + export"):
        try:
            source = model if rung == "export" else fx.symbolic_trace(model)
        except Exception as error:
            reasons.append(f"{rung}: {first_line(error)}")
            continue
        for dynamic in (True, False) if dynamic_shapes is not None else (False,):
            try:
                program = _export(source, args, kwargs, dynamic_shapes if dynamic else None)
            except Exception as error:
                reasons.append(f"{rung}, {'dynamic' if dynamic else 'static'} shapes: {first_line(error)}")
                continue
            really = dynamic and _is_dynamic(program)
            if dynamic and not really:
                reasons.append(f"{rung}: the model fixes its batch size")
            return Capture(program, rung, really, tuple(reasons))
    raise CaptureError("the model could not be captured:\n  " + "\n  ".join(reasons))


def first_line(error: BaseException) -> str:
    """An error in one line: its type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _export(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: DynamicShapes
) -> ExportedProgram:
    if dynamic_shapes == "batch":
        args, kwargs = _with_batch_of_two(model, args, kwargs)
        dynamic_shapes = pytree.tree_map(_batch_dimension, (args, kwargs), is_leaf=lambda leaf: leaf is None)
        names = kwargs if not args else None
        dynamic_shapes = dynamic_shapes[1] if names else (*dynamic_shapes[0], *dynamic_shapes[1].values())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)


def _batch_dimension(value: object) -> object:
    return {0: Dim.AUTO} if isinstance(value, Tensor) and value.ndim else None


def _with_batch_of_two(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch of 1 is a constant to export; double it, if the model runs on two."""
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.ndim]
    if not tensors or any(tensor.shape[0] != 1 for tensor in tensors):
        return args, kwargs
    doubled = pytree.tree_map(
        lambda leaf: torch.cat([leaf, leaf]) if isinstance(leaf, Tensor) and leaf.ndim else leaf, (args, kwargs)
    )
    try:
        with torch.no_grad():
            model(*doubled[0], **doubled[1])
    except Exception:
        return args, kwargs
    return doubled  # type: ignore[no-any-return]


def _is_dynamic(program: ExportedProgram) -> bool:
    return any(
        isinstance(size, torch.SymInt)
        for node in program.graph.nodes
        if node.op == "placeholder" and isinstance(node.meta.get("val"), Tensor)
        for size in node.meta["val"].shape
    )
