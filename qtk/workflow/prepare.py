"""``prepare_model``: any module in, a graph out that shows every tensor and computes the same."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from qtk.capture.calls import Call, detached, raised_in
from qtk.capture.inputs import ExampleInputs, split_inputs
from qtk.capture.ladder import capture_graph, capture_tree
from qtk.capture.prepare_report import PrepareReport
from qtk.capture.prepared_model import REPORT, PreparedGraph, PreparedModel
from qtk.capture.torch_export import DynamicShapes, first_line, with_batch_of_two
from qtk.capture.untouched import untouched
from qtk.capture.verify_prepared import Outcome, eval_outcome, failure, train_difference
from qtk.errors import CaptureError, VerificationError
from qtk.graph.graphs import graphs
from qtk.graph.sites import EXCLUDED, GRAPH_PATH, add_labels, join, label
from qtk.nn.fast_path import fast_path_off
from qtk.registry import nearest
from qtk.torch_private import HigherOrderOperator, pytree

__all__ = ["ExampleInputs", "prepare_model"]

ORIGINAL = "qtk_original"
"""Key of ``meta``: the model behind a trace that is still to be captured."""


@fast_path_off()
def prepare_model(
    model: nn.Module,
    example_inputs: ExampleInputs | None = None,
    *,
    dynamic_shapes: DynamicShapes = "batch",
    modules_to_exclude: Collection[nn.Module | str] = (),
    verify: bool = True,
) -> PreparedModel:
    """Captures ``model`` as an ATen graph with its own parameters, names and train/eval behaviour.

    The fast path of torch's transformers is off meanwhile: what is captured and compared is the model as written.

    What cannot be one graph keeps its Python, and the modules it calls become graphs, islands, each by itself; the
    report has a line for each. No model that runs is refused.

    >>> import qtk, torch
    >>> prepared = qtk.prepare_model(torch.nn.Linear(4, 2), torch.randn(3, 4))
    >>> prepared(torch.randn(7, 4)).shape
    torch.Size([7, 2])
    >>> prepared.report.rung
    'export'

    Args:
        model: any module that runs on ``example_inputs``; left as it is, its parameters shared with the result. A
            prepared model is returned as it is; one prepared without inputs is captured now.
        example_inputs: a tensor, tuple or dict. Without them only a symbolic trace is made, and ``QuantSim``, which
            has inputs, finishes it.
        dynamic_shapes: ``"batch"`` lets axis 0 of every tensor vary, ``"all"`` every axis, ``None`` none; else as
            ``torch.export``, and then one graph or an error.
        modules_to_exclude: submodules, or their names, that stay in float.
        verify: compare with the original on ``example_inputs``, in eval mode and in train mode with dropout off.

    Raises: CaptureError if the model does not run, changes its inputs, or cannot have the given dynamic shapes;
        VerificationError if no rung of the ladder computes what the model computes.
    """
    started = time.perf_counter()
    if isinstance(model, PreparedModel):
        if model.report.complete:
            if modules_to_exclude:
                raise CaptureError("the model is prepared already; name modules_to_exclude when preparing it first")
            return model
        model = model.meta[ORIGINAL]
    names = [_names(model, module) for module in modules_to_exclude]
    excluded = set().union(*names)
    if example_inputs is None:
        return _traced(model, started)
    args, kwargs = split_inputs(example_inputs)
    notes = [*_register_dataclasses((args, kwargs))]
    expected = _run_once(model, args, kwargs)
    notes += _register_dataclasses(expected[0])
    try:
        prepared: PreparedModel = capture_graph(
            model, [Call(args, kwargs, None)], dynamic_shapes, verify=verify, expected=expected
        )
    except CaptureError as error:
        if dynamic_shapes not in ("batch", "all", None):
            raise  # shapes that the caller asked for cannot be had, on no rung
        prepared = capture_tree(model, args, kwargs, dynamic_shapes, error, expected=expected, excluded=excluded)
    for module in graphs(prepared).values():
        _exclude(module.graph, excluded)
    owners = _owners(prepared)
    notes += [f"modules_to_exclude: {min(own)} runs no op" for own in names if own.isdisjoint(owners)]
    notes += _unregistered(model)
    report = prepared.report
    if verify:
        try:
            with untouched(model):
                several = with_batch_of_two(model.eval(), args, kwargs) if report.dynamic else (args, kwargs)
            equal = report.eval_difference == 0.0 and several[0] is args and several[1] is kwargs
            in_eval = expected if equal else None
            difference, lost = train_difference(model, prepared, *several, in_eval=in_eval)
            report = replace(report, train_difference=difference)
            notes += lost
        except VerificationError as error:
            notes.append(failure(error))
        except Exception as error:  # whatever a user's train mode does, eval is captured: say so and go on
            notes.append(f"train mode could not be compared: {first_line(error)}")
    _restore(prepared, {path: module.training for path, module in model.named_modules(remove_duplicate=False)})
    nodes = [node for module in graphs(prepared).values() for node in module.graph.nodes]
    opaque = [str(node.target) for node in nodes if _is_nested(node)]
    prepared.meta[REPORT] = replace(
        report,
        opaque_parts=(*report.opaque_parts, *opaque),
        notes=tuple(notes),
        elapsed_s=time.perf_counter() - started,
    )
    return prepared


def _traced(model: nn.Module, started: float) -> PreparedModel:
    try:
        with untouched(model):
            traced = fx.symbolic_trace(model)
    except Exception as error:
        raise CaptureError(
            f"without example_inputs only a symbolic trace is possible, and it failed: {first_line(error)}; "
            "pass example_inputs"
        ) from error
    prepared = PreparedGraph(traced, traced.graph)
    notes = ("traced without inputs: QuantSim captures and verifies it when it has them",)
    prepared.meta[REPORT] = PrepareReport("fx", False, True, notes=notes, elapsed_s=time.perf_counter() - started)
    prepared.meta[ORIGINAL] = model
    return prepared


def _run_once(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outcome:
    """What comes out. Raises: CaptureError if nothing does, or if an input is not what it was."""
    try:
        outcome = eval_outcome(model, *(given := detached((args, kwargs))))
    except Exception as error:
        shapes = [tuple(leaf.shape) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        path = raised_in(model, error)
        where = f", in {path} ({type(model.get_submodule(path)).__name__})" if path else ""
        hint = "; to pass one dict, wrap it in a tuple" if kwargs and isinstance(error, TypeError) else ""
        raise CaptureError(
            f"{type(model).__name__} does not run on its example inputs (tensors of shape {shapes}){where}: "
            f"{first_line(error)}; pass inputs that model(...) accepts{hint}"
        ) from error
    for index, (a, b) in enumerate(zip(pytree.tree_leaves((args, kwargs)), pytree.tree_leaves(given), strict=True)):
        if isinstance(a, Tensor) and not _is_same(a, b):
            raise CaptureError(
                f"the forward of {type(model).__name__} changes its input {index} in place; let it work on a clone"
            )
    return outcome


def _is_same(a: Tensor, b: Tensor) -> bool:
    if a.layout != torch.strided:
        a, b = a.to_dense(), b.to_dense()
    return torch.equal(a.nan_to_num(), b.nan_to_num())


def _register_dataclasses(tree: object) -> Iterator[str]:
    """Lets ``torch.export`` look into the dataclasses of ``tree``. Yields: a note for each type."""
    for leaf in pytree.tree_leaves(tree):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            torch.export.register_dataclass(type(leaf))
            yield f"{type(leaf).__name__} is now known to torch's pytree as a dataclass"
            yield from _register_dataclasses([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])


def _unregistered(model: nn.Module) -> Iterator[str]:
    """Modules that torch does not know of, in lists and dicts. Yields: a note for each attribute that holds some."""
    known = set(model.modules())
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            held = value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()
            if any(isinstance(item, nn.Module) and item not in known for item in held) and not name.startswith("_"):
                yield (
                    f"{join(path, name)} holds modules in a {type(value).__name__}, where torch finds neither them nor "
                    "their parameters; use nn.ModuleList or nn.ModuleDict"
                )


def _names(model: nn.Module, module: nn.Module | str) -> set[str]:
    """Every name of an excluded module."""
    known = dict(model.named_modules(remove_duplicate=False))
    wanted = module if isinstance(module, nn.Module) else known.get(module)
    found = {path for path, other in known.items() if other is wanted}
    if not found:
        what = repr(module) if isinstance(module, str) else f"a {type(module).__name__}"
        hint = f"; {nearest(module, known)}" if isinstance(module, str) else ""
        raise CaptureError(f"modules_to_exclude: {what} is no submodule of {type(model).__name__}{hint}")
    return found


def _exclude(graph: fx.Graph, paths: set[str]) -> None:
    for node in graph.nodes:
        if not paths.isdisjoint(_stack(node)):
            add_labels(node, **{EXCLUDED: "1"})


def _owners(model: PreparedModel) -> set[str]:
    """The modules that run an op or, in Python, run as they are."""
    stacks = {path for module in graphs(model).values() for node in module.graph.nodes for path in _stack(node)}
    return stacks | {part.path for part in model.report.parts}


def _stack(node: fx.Node) -> Iterator[str]:
    """The paths of the modules around ``node``; those a symbolic trace has dissolved are prefixes of what is left."""
    for value in (node.meta.get("nn_module_stack") or {}).values():
        parts = join(label(node, GRAPH_PATH) or "", value[0].partition("@")[0]).split(".")
        yield from (".".join(parts[:depth]) for depth in range(len(parts) + 1))


def _is_nested(node: fx.Node) -> bool:
    return isinstance(node.target, HigherOrderOperator)


def _restore(prepared: PreparedModel, flags: dict[str, bool]) -> None:
    """Gives every module the training flag of its original, recovered modules that of their owner."""
    for path, module in prepared.named_modules(remove_duplicate=False):
        while path not in flags:
            path = path.rpartition(".")[0]
        module.training = flags[path]
