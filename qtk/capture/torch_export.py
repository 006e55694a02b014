"""Captures a module by ``torch.export``, or by a symbolic trace and then ``torch.export``."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram, ShapesCollection

from qtk.capture.calls import cloned, detached, distinct
from qtk.capture.inputs import is_free
from qtk.capture.markers import mark
from qtk.capture.recurrent_shapes import lengths_stay_free
from qtk.errors import OUT_OF_MEMORY, CaptureError, first_line
from qtk.torch_private import HigherOrderOperator, drop_input_guards, pytree, schema_of

Shapes: TypeAlias = "Mapping[str, Shapes] | Mapping[int, object] | tuple[Shapes, ...] | list[Shapes] | None"
"""Dynamic shapes, nested like the inputs; a tensor has axis → ``Dim``, ``Dim.AUTO``, a size, or ``None``: fixed."""

DynamicShapes: TypeAlias = (
    Literal["batch", "all"] | Mapping[str, Shapes] | tuple[Shapes, ...] | list[Shapes] | ShapesCollection | None
)
"""Which sizes may vary. ``"batch"``: axis 0 of every tensor; ``"all"``: every axis; ``None``: none; else as in
``torch.export``."""

GIVEN = "the given dynamic_shapes"
RUNGS = ("export", "fx + export")
"""The ways to capture a module as one graph, the better first."""


@dataclass(frozen=True, slots=True)
class Capture:
    """An exported program and how it was captured.

    Args:
        program: the program, in eval mode, functional, with marker ops.
        rung: one of ``RUNGS``.
        dynamic: whether some size of an input may vary.
        reasons: why a better rung, or a dynamic batch, was not reached.
        args: positional arguments of the capture, where a batch of one may be doubled.
        kwargs: keyword arguments likewise.
    """

    program: ExportedProgram
    rung: str
    dynamic: bool
    reasons: tuple[str, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def check_dynamic_shapes(dynamic_shapes: DynamicShapes) -> None:
    """Checks the type of ``dynamic_shapes``. Raises: CaptureError if it is none of those in ``DynamicShapes``."""
    if isinstance(dynamic_shapes, str):
        known = dynamic_shapes in ("batch", "all")
    else:
        known = dynamic_shapes is None or isinstance(dynamic_shapes, (Mapping, tuple, list, ShapesCollection))
    if not known:
        raise CaptureError(
            f"dynamic_shapes is {dynamic_shapes!r}; give 'batch', 'all', None, or what torch.export takes: a dict of "
            "shapes by argument, or a tuple of them"
        )


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic_shapes: DynamicShapes,
    *,
    rungs: Sequence[str] = RUNGS,
    owns_inputs: bool = False,
) -> Capture:
    """Exports and functionalizes ``model``, which must be in eval mode, by the first of ``rungs`` that works.

    With ``dynamic_shapes="all"`` each rung is tried with every axis free, then with a free batch, then with fixed
    shapes; with ``"batch"`` from the second on. With ``owns_inputs`` the program leaves its inputs as they are, where
    the model writes to them; nobody reads them afterwards.

    Raises: CaptureError with the reason of every rung, or naming a tensor that cannot be traced.
    """
    _refuse_quantized(model, args, kwargs)
    attempts = _attempts(model, args, kwargs, dynamic_shapes)
    reasons: list[str] = []
    for rung in rungs:
        try:
            source = model if rung == "export" else _trace(model, args, kwargs)
        except OUT_OF_MEMORY:
            raise
        except Exception as error:
            reasons.append(f"{rung}: {first_line(error)}")
            continue
        for label, some_args, some_kwargs, shapes in attempts:
            try:
                program = _export(source, some_args, some_kwargs, shapes)
                if owns_inputs and program.graph_signature.user_inputs_to_mutate:
                    with _on_copies(source):
                        program = _export(source, some_args, some_kwargs, shapes)
            except OUT_OF_MEMORY:
                raise
            except Exception as error:
                reasons.append(f"{rung}, {label}: {error if label == GIVEN else first_line(error)}")
                continue
            inputs = _tensor_inputs(program)
            tied = _tied_sizes(inputs)
            if tied is not None and label != GIVEN:
                reasons.append(f"{rung}, {label}: only sizes with {tied} would do")
                continue
            dynamic = any(is_free(size) for value in inputs.values() for size in value.shape)
            if label == "dynamic batch":
                reasons += [
                    f"{rung}: the code of the model fixes axis 0 of input {name} to {int(value.shape[0])}"
                    for name, value in inputs.items()
                    if value.ndim and not is_free(value.shape[0]) and int(value.shape[0]) > 1
                ]
            return Capture(program, rung, dynamic, tuple(reasons), some_args, some_kwargs)
    raise CaptureError("\n  ".join(reasons))


def _refuse_quantized(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises: CaptureError naming the first input or buffer of a quantized dtype: torch has no fake tensors of them."""
    inputs = {f"input {index}": leaf for index, leaf in enumerate(pytree.tree_leaves((args, kwargs)))}
    for name, value in (inputs | {f"buffer {name}": buffer for name, buffer in model.named_buffers()}).items():
        if isinstance(value, Tensor) and value.is_quantized:
            kind = str(value.dtype).removeprefix("torch.")
            raise CaptureError(f"{name} is {kind}, and torch cannot trace quantized tensors; give it dequantized")


def _attempts(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: DynamicShapes
) -> list[tuple[str, tuple[Any, ...], dict[str, Any], DynamicShapes]]:
    """The attempts of each rung, in order: label, arguments, dynamic shapes."""
    if dynamic_shapes is None:
        return [("static shapes", args, kwargs, None)]
    if dynamic_shapes not in ("all", "batch"):
        return [(GIVEN, args, kwargs, dynamic_shapes)]
    doubled = with_batch_of_two(model, args, kwargs)
    attempts = [("dynamic batch", *doubled, free_shapes(model, *doubled)), ("static shapes", args, kwargs, None)]
    if dynamic_shapes == "all":
        attempts.insert(0, ("dynamic shapes", *doubled, free_shapes(model, *doubled, every_axis=True)))
    return attempts


def _export(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: DynamicShapes
) -> ExportedProgram:
    args, kwargs = distinct((args, kwargs))
    with silent_torch(), lengths_stay_free():
        program = torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)
        mark(program.graph_module)
        drop_input_guards(program)  # ``check_inputs`` is ours
        functional: ExportedProgram = program if _is_functional(program) else program.run_decompositions({})
        return functional


@contextlib.contextmanager
def _on_copies(model: nn.Module) -> Iterator[None]:
    """Runs ``model`` on copies of its inputs, which may be written to, before its own hooks see them."""
    handle = model.register_forward_pre_hook(
        lambda _, args, kwargs: cloned((args, kwargs)), with_kwargs=True, prepend=True
    )
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def silent_torch() -> Iterator[None]:
    """Silences the warnings, logs and stderr of torch's exporters; exceptions pass."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def _is_functional(program: ExportedProgram) -> bool:
    """Whether no op writes into its input and no region is nested, so that functionalization can be skipped."""
    ops = [node.target for node in program.graph.nodes if node.op == "call_function"]
    return not any(
        isinstance(op, HigherOrderOperator) or ((schema := schema_of(op)) is not None and schema.is_mutable)
        for op in ops
    )


def _trace(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.GraphModule:
    """A symbolic trace of ``model`` with the defaults of all omitted arguments as constants.

    With keyword arguments the defaults stay symbolic: fx would mix up the order of the remaining arguments.
    """
    bound = inspect.signature(model.forward).bind(*args, **kwargs)
    passed = set(bound.arguments)
    bound.apply_defaults()
    defaults = {name: value for name, value in bound.arguments.items() if name not in passed and value not in ((), {})}
    return fx.symbolic_trace(model, concrete_args=defaults if defaults and not kwargs else None)


def with_batch_of_two(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Doubles a batch of 1, which ``torch.export`` takes for a constant, if the model runs on two samples."""
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.ndim]
    if all(tensor.shape[0] != 1 for tensor in tensors):
        return args, kwargs
    doubled: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(
        lambda leaf: torch.cat([leaf, leaf]) if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == 1 else leaf,
        (args, kwargs),
    )
    try:
        with torch.no_grad():
            model(*detached(doubled[0]), **detached(doubled[1]))
    except OUT_OF_MEMORY:
        raise
    except Exception:
        return args, kwargs
    return doubled


def free_shapes(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, every_axis: bool = False
) -> DynamicShapes:
    """Dynamic shapes by argument name in which axis 0 of every tensor may vary, or every axis."""
    bound = inspect.signature(model.forward).bind(*args, **kwargs).arguments

    def free(leaf: object) -> dict[int, Any] | None:
        if not isinstance(leaf, Tensor) or not leaf.ndim:
            return None
        return dict.fromkeys(range(leaf.ndim if every_axis else 1), Dim.AUTO)

    shapes: DynamicShapes = pytree.tree_map(free, bound)
    return shapes


def _tied_sizes(inputs: Mapping[str, Tensor]) -> str | None:
    """A free size that the model's code derives from others, ``x.shape[0] = 10 - s80``; ``None`` if there is none."""
    for name, value in inputs.items():
        for axis, size in enumerate(value.shape):
            if isinstance(size, torch.SymInt) and is_free(size) and not size.node.expr.is_Symbol:
                return f"{name}.shape[{axis}] = {size}"
    return None


def _tensor_inputs(program: ExportedProgram) -> dict[str, Tensor]:
    """Name → fake tensor of every tensor input of a program."""
    names = set(program.graph_signature.user_inputs)
    values = {node.name: node.meta.get("val") for node in program.graph.find_nodes(op="placeholder")}
    return {name: value for name, value in values.items() if name in names and isinstance(value, Tensor)}
