"""``prepare_model``: any module in, a graph out that shows every tensor and computes the same."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from qtk.errors import CaptureError
from qtk.graph.canonicalize import canonicalize
from qtk.graph.capture import DynamicShapes, ExampleInputs, capture, first_line, split_inputs
from qtk.graph.planner import unknown_ops
from qtk.graph.prepare_report import PrepareReport
from qtk.graph.prepared_model import PreparedModel
from qtk.graph.sites import EXCLUDED, annotate
from qtk.registry import nearest
from qtk.workflow.feed import evaluating
from qtk.workflow.verify_prepared import eval_difference, failure, train_difference

__all__ = ["ExampleInputs", "prepare_model"]


def prepare_model(
    model: nn.Module,
    example_inputs: ExampleInputs | None = None,
    *,
    dynamic_shapes: DynamicShapes = "batch",
    modules_to_exclude: Collection[nn.Module | str] = (),
    verify: bool = True,
) -> PreparedModel:
    """Captures ``model`` as one ATen graph with its own parameters, names and train/eval behaviour.

    >>> import qtk, torch
    >>> prepared = qtk.prepare_model(torch.nn.Linear(4, 2), torch.randn(3, 4))
    >>> prepared(torch.randn(7, 4)).shape
    torch.Size([7, 2])
    >>> prepared.report.rung
    'export'

    Args:
        model: any module that runs on ``example_inputs``; left as it is, its parameters shared with the result.
        example_inputs: a tensor, tuple or dict. Without them only a symbolic trace is made, and ``QuantSim``, which
            has inputs, finishes it.
        dynamic_shapes: ``"batch"`` lets dimension 0 of every tensor vary, ``None`` fixes all; else as ``torch.export``.
        modules_to_exclude: submodules, or their names, that stay in float.
        verify: compare with the original on ``example_inputs``, in eval mode and in train mode with dropout off.

    Raises: CaptureError if the model does not run, changes its inputs, or no capture succeeds; VerificationError if
        the result computes something else.
    """
    started = time.perf_counter()
    if example_inputs is None:
        return _traced(model, started)
    args, kwargs = split_inputs(example_inputs)
    excluded = _paths(model, modules_to_exclude)
    flags = {path: module.training for path, module in model.named_modules(remove_duplicate=False)}
    with evaluating(model):
        _refuse_unrunnable(model, args, kwargs)
        captured = capture(model, args, kwargs, dynamic_shapes)
        prepared, swaps = canonicalize(captured.program, model)
        prepared.eval()
        _exclude(prepared.graph, excluded)
        report = PrepareReport(
            captured.rung, True, captured.dynamic, captured.reasons, swaps, unknown_ops(prepared.graph)
        )
        if verify:
            report = replace(report, eval_difference=eval_difference(model, prepared, args, kwargs))
            try:
                report = replace(report, train_difference=train_difference(model, prepared, args, kwargs))
            except Exception as error:  # whatever a user's train mode does, eval is captured: say so and go on
                report = replace(report, notes=(failure(error),))
    _restore(prepared, flags)
    prepared.meta["report"] = replace(report, elapsed_s=time.perf_counter() - started)
    return prepared


def _traced(model: nn.Module, started: float) -> PreparedModel:
    try:
        traced = fx.symbolic_trace(model)
    except Exception as error:
        raise CaptureError(
            f"without example_inputs only a symbolic trace is possible, and it failed: {first_line(error)}; "
            "pass example_inputs"
        ) from error
    prepared = PreparedModel(traced, traced.graph)
    notes = ("traced without inputs: QuantSim captures and verifies it when it has them",)
    prepared.meta["report"] = PrepareReport("fx", False, True, notes=notes, elapsed_s=time.perf_counter() - started)
    return prepared


def _refuse_unrunnable(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    before = pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, (args, kwargs))
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    except Exception as error:
        shapes = [tuple(leaf.shape) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        raise CaptureError(
            f"{type(model).__name__} does not run on its example inputs (tensors of shape {shapes}): "
            f"{first_line(error)}; pass inputs that model(...) accepts"
        ) from error
    old, new = pytree.tree_leaves(before), pytree.tree_leaves((args, kwargs))
    for index, (a, b) in enumerate(zip(old, new, strict=True)):
        if isinstance(a, Tensor) and not torch.equal(a.nan_to_num(), b.nan_to_num()):
            b.copy_(a)
            raise CaptureError(
                f"the forward of {type(model).__name__} changes its input {index} in place; let it work on a clone"
            )


def _paths(model: nn.Module, modules: Collection[nn.Module | str]) -> set[str]:
    names = {module: path for path, module in model.named_modules()}
    known = set(names.values())
    paths = set()
    for module in modules:
        path = names.get(module) if isinstance(module, nn.Module) else module
        if path is None or path not in known:
            what = repr(module) if isinstance(module, str) else type(module).__name__
            raise CaptureError(f"modules_to_exclude: {what} is no submodule of the model; {nearest(str(path), known)}")
        paths.add(path)
    return paths


def _exclude(graph: fx.Graph, paths: set[str]) -> None:
    for node in graph.nodes:
        stack = node.meta.get("nn_module_stack") or {}
        if any(value[0].partition("@")[0] in paths for value in stack.values()):
            annotate(node, **{EXCLUDED: "1"})


def _restore(prepared: PreparedModel, flags: dict[str, bool]) -> None:
    """Gives every module the training flag of its original, recovered modules that of their owner."""
    for path, module in prepared.named_modules(remove_duplicate=False):
        while path not in flags:
            path = path.rpartition(".")[0]
        module.training = flags[path]
