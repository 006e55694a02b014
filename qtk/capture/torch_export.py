"""Captures a module by ``torch.export``, or by a symbolic trace and then ``torch.export``."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.fx import config as fx_config

from qtk.calls.calls import cloned, distinct
from qtk.calls.inputs import is_free
from qtk.calls.served_sizes import GIVEN, LATE, STATIC
from qtk.capture.buffer_writes import assigned_in_place
from qtk.capture.free_shapes import (
    DynamicShapes,
    LeafAxis,
    batch_elsewhere,
    free_shapes,
    named_axes,
    refuse_unfree_names,
    token_axes,
    with_batch_of_two,
)
from qtk.capture.recurrent_tracing import lengths_stay_free, packing_as_ops
from qtk.capture.tracing import FLOOR_S, TIMES, OutOfTime, tracing_for, without_collections
from qtk.capture.train_mode.markers import mark
from qtk.errors import OUT_OF_MEMORY, CaptureError, first_line
from qtk.torch_private import HigherOrderOperator, drop_input_guards, pytree, schema_of

ALL_LABEL, TOKENS_LABEL, BATCH_LABEL = "dynamic shapes", "dynamic batch and tokens", "dynamic batch"
GIVEN_LABEL = "the given dynamic_shapes"
LIMITED = (ALL_LABEL, TOKENS_LABEL)
"""The attempts that end with the time of ``tracing_for``."""
_NO_TRACES = "do_not_emit_stack_traces"
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
        asked: what was asked to be free, as in ``ServedSizes``.
        names: axis → the name that explicit dynamic shapes give it.
    """

    program: ExportedProgram
    rung: str
    dynamic: bool
    reasons: tuple[str, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    asked: str
    names: Mapping[LeafAxis, str]


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic_shapes: DynamicShapes,
    *,
    rungs: Sequence[str] = RUNGS,
    owns_inputs: bool = False,
    unfree: Collection[LeafAxis] = (),
    known: Collection[int] = (),
    doubles: bool = True,
) -> Capture:
    """Exports and functionalizes ``model``, which must be in eval mode, by the first of ``rungs`` that works.

    With ``dynamic_shapes="all"`` each rung is tried with every axis free, then with free batch and tokens, then with a
    free batch, then with fixed shapes; with ``"batch"`` from the third on. The first two have ``FLOOR_S`` seconds, or
    ``TIMES`` times what a free batch takes. Where the axes 0 are fixed by the batch on another axis of another
    input (the states of a recurrent net), that axis is free too. An axis that is read index by index stays fixed.

    Args:
        model: the module, in eval mode.
        args: positional arguments.
        kwargs: keyword arguments.
        dynamic_shapes: see ``DynamicShapes``.
        rungs: the rungs of ``RUNGS`` to try.
        owns_inputs: the program leaves its inputs as they are, where the model writes to them; nobody reads them
            afterwards.
        unfree: axes that stay fixed, by the number of the leaf in the arguments.
        known: leaves whose values are written into the graph (``written_in``); a batch of one is not doubled then.
        doubles: whether a batch of one is doubled; not where the graph then needs it as large as another.

    Raises: CaptureError with the reason of every rung, or naming a tensor that cannot be traced.
    """
    _refuse_quantized(model, args, kwargs)
    names: dict[LeafAxis, str] = {}
    if not isinstance(dynamic_shapes, str | None):
        args, kwargs = distinct((args, kwargs))
        dynamic_shapes, names = named_axes(dynamic_shapes, model, args, kwargs)
    attempts = _attempts(model, args, kwargs, dynamic_shapes, unfree, known, doubles=doubles)
    reasons: list[str] = []
    for rung in rungs:
        try:
            source = model if rung == "export" else _trace(model, args, kwargs)
        except OUT_OF_MEMORY:
            raise
        except Exception as error:
            reasons.append(f"{rung}: {first_line(error)}")
            continue
        late: list[_Attempt] = []
        for attempt in attempts:
            started = time.thread_time()
            try:
                with tracing_for(FLOOR_S if attempt.label in LIMITED else None):
                    program = _attempted(source, attempt, owns_inputs=owns_inputs)
            except OutOfTime:
                late.append(attempt)
                continue
            except OUT_OF_MEMORY:
                raise
            except Exception as error:
                text = error if attempt.label == GIVEN_LABEL else first_line(error)
                reasons.append(f"{rung}, {attempt.label}: {text}")
                continue
            longer_s = TIMES * (time.thread_time() - started)
            if late and attempt.label not in LIMITED and longer_s > FLOOR_S:
                attempt, program = _in_time(source, late, longer_s, owns_inputs=owns_inputs) or (attempt, program)
            singly = _read_singly(program, attempt) if attempt.label != GIVEN_LABEL else ()
            if singly:
                return capture(model, args, kwargs, dynamic_shapes, rungs=rungs, owns_inputs=owns_inputs,
                               unfree={*unfree, *singly}, known=known)
            if doubles and not _serves(program, attempt, args, kwargs):
                return capture(model, args, kwargs, dynamic_shapes, rungs=rungs, owns_inputs=owns_inputs,
                               unfree=unfree, known=known, doubles=False)
            tied = _tied_sizes(_tensor_inputs(program))
            if tied is not None and attempt.label != GIVEN_LABEL:
                reasons.append(f"{rung}, {attempt.label}: only sizes with {tied} would do")
                continue
            return _captured(program, rung, attempt, reasons, late, dynamic_shapes, names)
    raise CaptureError("\n  ".join(reasons))


def _captured(
    program: ExportedProgram, rung: str, attempt: _Attempt, reasons: list[str], late: Collection[_Attempt],
    dynamic_shapes: DynamicShapes, names: Mapping[LeafAxis, str],
) -> Capture:
    inputs = _tensor_inputs(program)
    asked = STATIC if dynamic_shapes is None else dynamic_shapes if isinstance(dynamic_shapes, str) else GIVEN
    if late and attempt not in late:
        asked = LATE
        free = attempt.label.removeprefix("dynamic ")
        reasons.append(f"{rung}: freeing every axis takes more than {TIMES:.0f} times as long as freeing the batch and "
                       f"was stopped; free: {free}. Others can be freed by name, without a limit of time: "
                       'dynamic_shapes={"input": {0: "batch", 2: "height"}}')
        warnings.warn(reasons[-1], stacklevel=2)
    if attempt.label == BATCH_LABEL:
        batches = {str(value.shape[0]) for value in inputs.values() if value.ndim and is_free(value.shape[0])}
        reasons += [
            f"{rung}: the code of the model fixes axis 0 of input {name} to {int(value.shape[0])}"
            for name, value in inputs.items()
            if value.ndim and not is_free(value.shape[0]) and int(value.shape[0]) > 1
            and batches.isdisjoint(map(str, value.shape))
        ]
    dynamic = any(is_free(size) for value in inputs.values() for size in value.shape)
    refuse_unfree_names(names, *_leaf_sizes(inputs, attempt.args, attempt.kwargs))
    return Capture(program, rung, dynamic, tuple(reasons), attempt.args, attempt.kwargs, asked, names)


def _refuse_quantized(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises: CaptureError naming the first input or buffer of a quantized dtype: torch has no fake tensors of them."""
    inputs = {f"input {index}": leaf for index, leaf in enumerate(pytree.tree_leaves((args, kwargs)))}
    for name, value in (inputs | {f"buffer {name}": buffer for name, buffer in model.named_buffers()}).items():
        if isinstance(value, Tensor) and value.is_quantized:
            kind = str(value.dtype).removeprefix("torch.")
            raise CaptureError(f"{name} is {kind}, and torch cannot trace quantized tensors; give it dequantized")


@dataclass(frozen=True, eq=False, slots=True)
class _Attempt:
    """Arguments and dynamic shapes to export with; ``shapes_with`` gives shapes in which further axes are free."""

    label: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shapes: DynamicShapes
    shapes_with: Callable[[Collection[LeafAxis]], DynamicShapes] | None = None


def _attempts(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: DynamicShapes,
    unfree: Collection[LeafAxis], known: Collection[int], *, doubles: bool,
) -> list[_Attempt]:
    """The attempts of each rung, in order."""
    static = _Attempt("static shapes", args, kwargs, None)
    if dynamic_shapes is None:
        return [static]
    if not isinstance(dynamic_shapes, str):
        return [_Attempt(GIVEN_LABEL, args, kwargs, dynamic_shapes)]
    doubled = with_batch_of_two(model, args, kwargs) if doubles and not known else (args, kwargs)
    leaves = pytree.tree_leaves((args, kwargs))
    unfree = {*unfree, *((number, axis) for number in known for axis in range(leaves[number].ndim))}

    def with_others(others: Collection[LeafAxis]) -> DynamicShapes:
        return free_shapes(model, *doubled, lambda axis: (axis[1] == 0 or axis in others) and axis not in unfree)

    batch = _Attempt(BATCH_LABEL, *doubled, with_others(()), with_others)
    if dynamic_shapes == "batch":
        return [batch, static]
    every = free_shapes(model, *doubled, lambda axis: axis not in unfree)
    tokens = token_axes(*doubled)
    of_tokens = with_others(tokens)
    between = [_Attempt(TOKENS_LABEL, *doubled, of_tokens)] if tokens and of_tokens != every else []
    return [_Attempt(ALL_LABEL, *doubled, every), *between, batch, static]


def _attempted(source: nn.Module, attempt: _Attempt, *, owns_inputs: bool) -> ExportedProgram:
    shapes = attempt.shapes
    program = _export(source, attempt.args, attempt.kwargs, shapes)
    if attempt.shapes_with is not None:
        program, shapes = _with_batch(source, program, attempt.args, attempt.kwargs, attempt.shapes_with)
    if owns_inputs and program.graph_signature.user_inputs_to_mutate:
        with _on_copies(source):
            program = _export(source, attempt.args, attempt.kwargs, shapes)
    return program


def _serves(program: ExportedProgram, attempt: _Attempt, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Says whether a program from doubled inputs serves the inputs themselves.

    Sizes that it fixes are theirs then, and sizes that it needs equal are equal.
    """
    sizes, _ = _leaf_sizes(_tensor_inputs(program), attempt.args, attempt.kwargs)
    leaves, lengths = pytree.tree_leaves((args, kwargs)), dict[str, int]()
    return all((lengths.setdefault(str(size), leaves[number].shape[axis]) if is_free(size) else size)
               == leaves[number].shape[axis] for (number, axis), size in sizes.items())


def _in_time(
    source: nn.Module, late: Collection[_Attempt], seconds: float, *, owns_inputs: bool
) -> tuple[_Attempt, ExportedProgram] | None:
    """The first of ``late`` that ends in so many seconds, and its program."""
    for attempt in late:
        try:
            with tracing_for(seconds):
                return attempt, _attempted(source, attempt, owns_inputs=owns_inputs)
        except OUT_OF_MEMORY:
            raise
        except (OutOfTime, Exception):  # a free batch does in its place
            continue
    return None


def _with_batch(
    source: nn.Module, program: ExportedProgram, args: tuple[Any, ...], kwargs: dict[str, Any],
    shapes_with: Callable[[Collection[LeafAxis]], DynamicShapes],
) -> tuple[ExportedProgram, DynamicShapes]:
    """``program``, or one in which the batch is free that another axis than 0 holds fixed in it, and its shapes."""
    asked = {*batch_elsewhere(_tensor_inputs(program), args, kwargs)}
    fixed = {name for name, value in _tensor_inputs(program).items() if value.ndim and not is_free(value.shape[0])}
    while asked:
        freed = _export(source, args, kwargs, shapes_with(asked))
        values = _tensor_inputs(freed)
        batches = {str(values[name].shape[0]) for name in fixed if is_free(values[name].shape[0])}
        sizes, _ = _leaf_sizes(values, args, kwargs)
        others = {axis for axis in asked if is_free(sizes[axis]) and str(sizes[axis]) not in batches}
        if not batches:
            break
        if not others:
            return freed, shapes_with(asked)
        asked -= others
    return program, shapes_with(())


def _export(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: DynamicShapes
) -> ExportedProgram:
    from qtk.capture.fresh_constants import settle_fresh_constants

    args, kwargs = distinct((args, kwargs))
    has_buffers = any(True for _ in model.buffers())
    with (
        silent_torch(), lengths_stay_free(), packing_as_ops(), without_collections(),
        assigned_in_place(model) if has_buffers else contextlib.nullcontext(),
    ):
        program = torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)
        mark(program.graph_module)
        settle_fresh_constants(program.graph)
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
    """Silences the warnings, logs and stderr of torch's exporters; exceptions pass.

    From torch 2.14 on, nodes do not hold either where in the code they were made, which takes a twentieth of a capture.
    """
    level, traced = logging.root.manager.disable, fx_config.__dict__.get(_NO_TRACES)
    logging.disable(logging.CRITICAL)
    try:
        if traced is not None:
            setattr(fx_config, _NO_TRACES, True)
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
        if traced is not None:
            setattr(fx_config, _NO_TRACES, traced)


def _is_functional(program: ExportedProgram) -> bool:
    """Says whether no op writes into its input and no region is nested, so that functionalization can be skipped."""
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


def _leaf_sizes(
    inputs: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[LeafAxis, int], dict[int, str]]:
    """Axis → size in a program, and the number of a leaf → its name there."""
    numbers = [number for number, leaf in enumerate(pytree.tree_leaves((args, kwargs))) if isinstance(leaf, Tensor)]
    pairs = [*zip(numbers, inputs, strict=True)]
    sizes = {(number, axis): size for number, name in pairs for axis, size in enumerate(inputs[name].shape)}
    return sizes, dict(pairs)


def _read_singly(program: ExportedProgram, attempt: _Attempt) -> set[LeafAxis]:
    """Free axes that the code reads index by index, all of them (``h, c = state[0], state[1]``): no batch is there."""
    sizes, names = _leaf_sizes(_tensor_inputs(program), attempt.args, attempt.kwargs)
    leaves = pytree.tree_leaves((attempt.args, attempt.kwargs))
    readers = {node.name: node.users for node in program.graph.find_nodes(op="placeholder")}
    select = torch.ops.aten.select.int
    return {
        (number, axis) for (number, axis), size in sizes.items()
        if is_free(size) and readers[names[number]] and all(user.target is select for user in readers[names[number]])
        and {(user.args[1] % leaves[number].ndim, user.args[2] % leaves[number].shape[axis])
             for user in readers[names[number]] if isinstance(user.args[2], int)}
        == {(axis, index) for index in range(leaves[number].shape[axis])}
    }


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
