"""``prepare_model``: captures a module as a graph that computes the same and shows every tensor."""

from __future__ import annotations

import copy
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, fx, nn

from qtk.calls.calls import Call, leaves_text
from qtk.calls.inputs import ExampleInputs, split_inputs
from qtk.calls.signature import call_kind, signature_of
from qtk.capture.buffer_writes import pass_on_buffers
from qtk.capture.exclusion import exclude, module_names
from qtk.capture.fallback import Surroundings, capture_graph
from qtk.capture.first_run import FirstRun, first_run
from qtk.capture.free_axes import two_rows
from qtk.capture.free_shapes import DynamicShapes, check_dynamic_shapes, with_batch_of_two
from qtk.capture.held_tensors import own_tensors
from qtk.capture.holders import warn_of_hooks
from qtk.capture.island_search import capture_tree
from qtk.capture.prepare_report import PrepareReport
from qtk.capture.prepared_model import EXAMPLES, REPORT, WRITES, PreparedGraph, PreparedModel
from qtk.capture.restored import restored
from qtk.capture.tracing import TRACING
from qtk.capture.train_mode.train_branches import failure
from qtk.capture.train_mode.train_only import TrainOnly
from qtk.capture.variants import join_variants, refuse_equal_kinds, refuse_explicit_shapes, served_by_others, serving
from qtk.capture.verify_prepared import RunResult, train_difference
from qtk.capture.written_parameters import written_parameters
from qtk.core.needs import found_where
from qtk.data.labels import without_labels
from qtk.errors import CaptureError, VerificationError, first_line
from qtk.graph.graphs import contents_of, graphs, roots
from qtk.graph.sites import join
from qtk.nn.device import refuse_offloaded
from qtk.nn.eval_mode import fast_path_off
from qtk.operators.contents import Trait
from qtk.public import public
from qtk.quantizers.quantizer import Quantizer
from qtk.torch_private import HigherOrderOperator, pytree

__all__ = ["ExampleInputs", "prepare_model", "prepare_own"]

ORIGINAL, TO_EXCLUDE = "qtk_original", "qtk_to_exclude"
"""Keys of ``meta``: the model behind a trace that is still to be captured, and what to exclude from it then."""


@public
@fast_path_off()
def prepare_model(
    model: nn.Module,
    example_inputs: ExampleInputs | None = None,
    *,
    variants: Sequence[ExampleInputs] = (),
    dynamic_shapes: DynamicShapes = "batch",
    modules_to_exclude: Iterable[nn.Module | str] | str = (),
    verify: bool = True,
) -> PreparedModel:
    """Captures ``model`` as an ATen graph with its own parameters, names and train/eval behaviour.

    >>> import qtk, torch
    >>> prepared = qtk.prepare_model(torch.nn.Linear(4, 2), torch.randn(3, 4))
    >>> prepared(torch.randn(7, 4)).shape
    torch.Size([7, 2])

    A tuple goes in as ``model(*inputs)``, a dict as ``model(**inputs)``:

    >>> bilinear, x, y = torch.nn.Bilinear(4, 3, 2), torch.randn(5, 4), torch.randn(5, 3)
    >>> by_position = qtk.prepare_model(bilinear, (x, y))
    >>> by_name = qtk.prepare_model(bilinear, {"input1": x, "input2": y})
    >>> torch.equal(by_position(x, y), by_name(input1=x, input2=y))
    True

    Sizes other than the batch are fixed, and so is the batch if ``dynamic_shapes`` is ``None``:

    >>> fixed = qtk.prepare_model(torch.nn.Linear(4, 2), torch.randn(3, 4), dynamic_shapes=None)
    >>> fixed(torch.randn(7, 4))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    qtk.errors.CaptureError: input input has shape (7, 4), the model was captured for (3, 4); prepare it again with ...

    A model that is called with other inputs too, labels while it trains, a mask or none, gets a graph for each kind of
    call; give an example of each:

    >>> class WithLoss(torch.nn.Linear):
    ...     def forward(self, x, labels=None):
    ...         scores = super().forward(x)
    ...         return scores if labels is None else torch.nn.functional.cross_entropy(scores, labels)
    >>> x, labels = torch.randn(8, 4), torch.randint(2, (8,))
    >>> both = qtk.prepare_model(WithLoss(4, 2), x, variants=[{"x": x, "labels": labels}])
    >>> both(x).shape, both(x, labels).shape
    (torch.Size([8, 2]), torch.Size([]))

    Excluded modules stay in float:

    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    >>> prepared = qtk.prepare_model(net, torch.randn(3, 4), modules_to_exclude=["1"])
    >>> "1.weight" in qtk.QuantSim(prepared, torch.randn(3, 4)).quantizers
    False

    The report says how the model was captured and how far it is from the original:

    >>> print(prepared.report)  # doctest: +ELLIPSIS
    captured by export in ... s, dynamic batch
    max |prepared - original| in eval mode: 0
    max |prepared - original| in train mode: 0
    excluded, in float with what they read: 1

    What cannot be one graph keeps its Python, and the modules it calls become graphs, islands, each by itself; the
    report has a line for each. No model that runs is refused. The fast path of torch's transformers is off meanwhile:
    what is captured and compared is the model as written.

    Args:
        model: any module that runs on ``example_inputs``; left as it is, its parameters shared with the result. A
            prepared model is returned as it is; one prepared without inputs is captured now.
        example_inputs: a tensor, tuple or mapping; labels are left out. Without them only a symbolic trace is made, and
            ``QuantSim``, which has inputs, finishes it.
        variants: further example inputs, one for each other kind of call: inputs given or left out, other ranks or
            dtypes, other flags, one token beside several, other sizes that one graph does not serve. The graphs share
            parameters, and a value that several of them compute is one site.
        dynamic_shapes: ``"batch"`` lets axis 0 of every tensor vary, and the axes that must be as long; ``"all"``
            every axis, unless that takes too long; ``None`` none; else as ``torch.export``, or with names, which files
            have too: ``{"x": {0: "batch", 1: "frames"}, "h": {1: "batch"}}``, and then one graph or an error.
        modules_to_exclude: submodules, or their names, or one name, that stay in float, and so does what they read.
        verify: compare with the original on ``example_inputs`` in eval mode, and on two rows of them in train mode with
            dropout off.

    Raises: CaptureError if the model does not run, cannot have the given dynamic shapes, or one graph serves two
        variants; VerificationError if no rung of the ladder computes what the model computes.
    """
    if not isinstance(model, nn.Module):
        raise CaptureError(f"model must be a torch.nn.Module instance, got {model!r}; wrap a function in a module")
    check_dynamic_shapes(dynamic_shapes)
    quantizer = next((module for module in model.modules() if isinstance(module, Quantizer)), None)
    if quantizer is not None:
        raise CaptureError(f"the model holds quantizers already (of {quantizer.site}): it is, or holds, the model of a "
                           "simulation; pass the float model it was made from")
    to_exclude = [modules_to_exclude] if isinstance(modules_to_exclude, str) else list(modules_to_exclude)
    if isinstance(model, PreparedModel):
        if model.report.complete:
            return _as_it_is(model, to_exclude, variants)
        to_exclude = [*model.meta[TO_EXCLUDE], *to_exclude]
        model = model.meta[ORIGINAL]
    excluded = [module_names(model, module) for module in to_exclude]
    with TRACING:
        if example_inputs is None:
            return _traced(model, to_exclude, variants)
        calls = [Call(*split_inputs(without_labels(model, inputs)), None) for inputs in (example_inputs, *variants)]
        if variants:
            refuse_explicit_shapes(dynamic_shapes)
        return _prepared(model, calls, dynamic_shapes, excluded, verify=verify)


def prepare_own(
    model: nn.Module, example_inputs: ExampleInputs, variants: Sequence[ExampleInputs] = (), *, in_place: bool,
    dynamic_shapes: DynamicShapes = "batch",
) -> PreparedModel:
    """``model``, captured if it is not yet; a copy with parameters of its own unless ``in_place``.

    Raises: CaptureError if it cannot be copied, or is prepared and other ``dynamic_shapes`` are given, or the inputs of
        one of its variants.
    """
    if isinstance(model, PreparedModel) and model.report.complete and dynamic_shapes != "batch":
        raise CaptureError("the model is prepared already; give dynamic_shapes when preparing it")
    prepared = prepare_model(model, example_inputs, dynamic_shapes=dynamic_shapes, variants=variants)
    if isinstance(prepared, PreparedGraph) and prepared.variant(*split_inputs(example_inputs)) is not prepared:
        raise CaptureError(
            "example_inputs are of the kind of a variant, and what is planned, calibrated and exported is the first "
            "graph of the prepared model; pass inputs like the first example when it was prepared, "
            f"{leaves_text((prepared.examples[0].args, prepared.examples[0].kwargs))}, or prepare the model again with "
            "these as example_inputs, the first example in variants"
        )
    if in_place:
        return prepared
    try:
        return copy.deepcopy(prepared)
    except Exception as error:  # of what the user's modules hold
        raise CaptureError(
            f"the model cannot be copied: {first_line(error)}; pass in_place=True, which shares its "
            "parameters and overwrites them, or take out of the model what cannot be copied"
        ) from error


def _prepared(
    model: nn.Module, calls: Sequence[Call], dynamic_shapes: DynamicShapes, excluded: list[set[str]], *, verify: bool,
) -> PreparedModel:
    from qtk.calls.containers import register_containers
    from qtk.capture.skeleton import SKELETON, Skeleton

    started = time.perf_counter()
    refuse_offloaded(model)
    own_tensors(model)
    notes: list[str] = []
    train_only: dict[nn.Module, bool] = {}
    runs: list[FirstRun] = []
    is_meta = writes = False
    for call in calls:
        notes += register_containers((call.args, call.kwargs))
        run = first_run(model, call)
        runs.append(run)
        train_only |= run.train_only
        notes += [f"the forward of {type(model).__name__} changes its input {index} in place; the prepared model works "
                  "on a copy of it" for index in run.written]
        notes += register_containers(run.outcome.output)
        writes = writes or bool(run.written)
        is_meta = is_meta or any(tensor.is_meta for tensor in _tensors(model, call.args, call.kwargs))
    notes += [f"the forward of {type(model).__name__} writes its parameter {name} in place; it is left as it was, and "
              "a graph computes in each call what is written" for name in written_parameters(model)]
    notes += ["tensors without values (meta): nothing could be compared with the original"] if is_meta else []
    verify = verify and not is_meta
    graphs_of_calls, prepared = _captured(
        model, calls, dynamic_shapes, runs=runs, excluded=excluded, verify=verify, train_only=train_only
    )
    expected = [run.outcome for run in runs]
    trained = [_train_difference(model, graph, call.args, call.kwargs, outcome, train_only)
               for graph, call, outcome in zip(graphs_of_calls, calls, expected, strict=True)] if verify else []
    if isinstance(prepared, PreparedGraph) and len(calls) > 1:
        join_variants(model, graphs_of_calls, calls, expected if verify else ())
    found_where({Trait.WRITES}, contents_of(prepared), lambda: pass_on_buffers(roots(prepared).values()), None)
    notes += [*(exclude(prepared, excluded) if excluded else ()), *_unregistered(model)]
    unknown = None if isinstance(prepared, PreparedGraph) else _registration(calls, expected)
    notes += [] if unknown is None else [unknown]
    _restore_training_flags(prepared, model)
    warn_of_hooks(model, prepared)
    if is_meta:
        prepared.meta[REPORT] = replace(prepared.report, eval_difference=None)
    prepared.meta[WRITES] = writes
    prepared.meta[EXAMPLES], prepared.meta[SKELETON] = tuple(calls), Skeleton(model)
    differences = [difference for difference, _ in trained]
    known = [difference for difference in differences if difference is not None]
    prepared.meta[REPORT] = replace(
        prepared.report,
        train_difference=max(known) if known and len(known) == len(differences) else None,
        opaque_parts=(*prepared.report.opaque_parts, *_nested_ops(prepared)),
        notes=tuple(dict.fromkeys(notes)),
        train_notes=tuple(dict.fromkeys(note for _, of_call in trained for note in of_call)),
        elapsed_s=time.perf_counter() - started,
    )
    return prepared


def _as_it_is(
    prepared: PreparedModel, modules_to_exclude: Collection[nn.Module | str], variants: Sequence[ExampleInputs]
) -> PreparedModel:
    if modules_to_exclude:
        raise CaptureError("the model is prepared already; name modules_to_exclude when preparing it first")
    if variants:
        raise CaptureError("the model is prepared already; give variants when preparing it first")
    return prepared


def _traced(
    model: nn.Module, modules_to_exclude: Collection[nn.Module | str], variants: Sequence[ExampleInputs]
) -> PreparedModel:
    if variants:
        raise CaptureError("variants are captured with example_inputs; give both, or both to QuantSim")
    started = time.perf_counter()
    try:
        with restored(model):
            traced = fx.symbolic_trace(model)
    except Exception as error:
        raise CaptureError(
            f"without example_inputs only a symbolic trace is possible, and it failed: {first_line(error)}; "
            "pass example_inputs"
        ) from error
    prepared = PreparedGraph(traced, traced.graph)
    notes = ("traced without inputs: QuantSim captures and verifies it when it has them",)
    prepared.meta[REPORT] = PrepareReport("fx", False, True, notes=notes, elapsed_s=time.perf_counter() - started)
    prepared.meta[ORIGINAL], prepared.meta[TO_EXCLUDE] = model, tuple(modules_to_exclude)
    return prepared


def _captured(
    model: nn.Module,
    calls: Sequence[Call],
    dynamic_shapes: DynamicShapes,
    *,
    runs: Sequence[FirstRun],
    excluded: Collection[set[str]],
    verify: bool,
    train_only: TrainOnly,
) -> tuple[Sequence[PreparedModel], PreparedModel]:
    """Captures one graph for each call if possible, else islands in the model's own Python.

    Returns: what serves each call, and what will serve all.
    """
    expected = [run.outcome for run in runs]
    loops = [None if run.loops is None else (call, run.loops) for call, run in zip(calls, runs, strict=True)]
    around = [Surroundings(owns_inputs=True, train_only=train_only, loops=known) for known in loops]
    capturing = partial(capture_graph, model, dynamic_shapes=dynamic_shapes, verify=verify)
    try:
        captured = [capturing([call], expected=outcome, around=known)
                    for call, outcome, known in zip(calls, expected, around, strict=True)]
        for index, axes in served_by_others(captured, calls).items():
            captured[index] = capturing([calls[index]], expected=expected[index],
                                        around=replace(around[index], ones=axes))
    except CaptureError as error:
        if dynamic_shapes not in ("batch", "all", None):
            text = _registration(calls, expected)  # explicit dynamic shapes are for one graph
            raise error if text is None else CaptureError(f"{error}\n  {text}") from error
        refuse_equal_kinds([call_kind(signature_of(model), call.args, call.kwargs) for call in calls], calls)
        paths = set().union(*excluded)
        tree = capture_tree(model, calls, dynamic_shapes, error, expected=expected, excluded=paths,
                            train_only=train_only)
        return [tree] * len(calls), tree
    refuse_equal_kinds([*map(serving, captured)], calls)
    return captured, captured[0]


def _registration(calls: Sequence[Call], expected: Sequence[RunResult]) -> str | None:
    """Returns what to write so that torch can look into all that the calls take and return; ``None`` if it can."""
    from qtk.calls.containers import registration_text

    return registration_text([(call.args, call.kwargs, outcome.output)
                              for call, outcome in zip(calls, expected, strict=True)])


def _train_difference(
    model: nn.Module, prepared: PreparedModel, args: tuple[Any, ...], kwargs: dict[str, Any], expected: RunResult,
    train_only: TrainOnly,
) -> tuple[float | None, list[str]]:
    """The difference in train mode, ``None`` if it is too large or unknown, and notes."""
    whole = Call(args, kwargs, None)
    few = _two_rows(model, prepared, whole) if prepared.report.dynamic else whole
    for call in dict.fromkeys((few, whole)):
        in_eval = expected if call is whole and prepared.report.eval_difference == 0.0 else None
        try:
            return train_difference(
                model, prepared, call.args, call.kwargs, in_eval=in_eval, train_only=train_only.keys()
            )
        except VerificationError as error:
            return None, [failure(model, call.args, call.kwargs, train_only, error)]
        except Exception as error:  # whatever a user's train mode does, eval is captured: say so and go on
            reason = first_line(error)
    return None, [f"train mode could not be compared: {reason}"]


def _two_rows(model: nn.Module, prepared: PreparedModel, call: Call) -> Call:
    """``call`` with two rows: a batch norm in train mode takes no single one, and of many two tell as much."""
    if isinstance(prepared, PreparedGraph):
        return two_rows(prepared, call)
    with restored(model):
        args, kwargs = with_batch_of_two(model.eval(), call.args, call.kwargs)
    return call if args is call.args and kwargs is call.kwargs else Call(args, kwargs, None)


def _tensors(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    return [*model.parameters(), *model.buffers(), *leaves]


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


def _nested_ops(prepared: PreparedModel) -> list[str]:
    """The ops that take graphs of their own, whose inside is not shown."""
    nodes = [node for module in graphs(prepared).values() for node in module.graph.nodes]
    return [str(node.target) for node in nodes if isinstance(node.target, HigherOrderOperator)]


def _restore_training_flags(prepared: PreparedModel, model: nn.Module) -> None:
    """Gives every module the training flag of its original, and recovered modules the flag of their owner."""
    flags = {path: module.training for path, module in model.named_modules(remove_duplicate=False)}
    for path, module in prepared.named_modules(remove_duplicate=False):
        while path not in flags:
            path = path.rpartition(".")[0]
        module.training = flags[path]
