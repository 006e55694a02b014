"""Captures a model by the first rung of a ladder that works: one graph, else islands, else opaque.

1. ``export``, 2. ``fx + export``: the module becomes one graph, whose outputs are compared with the module's. The
   graph of a recurrent net on packed sequences, which cannot be captured, is ``built`` by hand.
3. ``python``: the module keeps its code, and each module it calls is tried from rung 1 on (``island_search``).
4. ``opaque``: a module that calls no other stays as it is.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import FunctionType

import torch
from torch import nn

from qtk.calls.calls import Call, distinct, with_rows
from qtk.calls.served_sizes import SIZES, ServedSizes
from qtk.calls.signature import call_kind, signature_of
from qtk.capture.canonicalize import canonicalize
from qtk.capture.first_difference import first_difference
from qtk.capture.free_shapes import DynamicShapes, LeafAxis, names_by_input
from qtk.capture.known_inputs import known_inputs, written_in
from qtk.capture.open_composites import open_composites
from qtk.capture.other_sizes import LEAST_S, TIME_SHARE, try_other_sizes
from qtk.capture.packed import build_packed
from qtk.capture.prepare_report import PrepareReport
from qtk.capture.prepared_model import ATTRIBUTES, KIND, REPORT, SIGNATURE, PreparedGraph
from qtk.capture.recurrent_tracing import takes_packed
from qtk.capture.restored import restored
from qtk.capture.scans import loops_of, scans_as_ops
from qtk.capture.torch_export import RUNGS, Capture, capture
from qtk.capture.train_mode.train_only import TrainOnly, as_ops
from qtk.capture.verify_prepared import RunResult, difference_over_calls
from qtk.core.needs import found_where
from qtk.errors import OUT_OF_MEMORY, CaptureError, QtkError, first_line
from qtk.graph.coverage import unknown_ops
from qtk.graph.plain_attributes import PlainAttributes
from qtk.operators.contents import Trait, contents
from qtk.torch_private import pytree

BUILT = "built"
"""The rung of a graph that is built by hand."""


@dataclass(frozen=True, slots=True, eq=False)
class Surroundings:
    """What is known of the model that a module is part of.

    Args:
        place: module path of the module in the whole model.
        owns_inputs: see ``capture``.
        train_only: the modules in the module that act in train mode only.
        ones: axes of length 1 that stay so; others are free where the module takes them longer.
        loops: a call that was run, and the functions that may be recurrences in it, as ``loops_of``.
    """

    place: str = ""
    owns_inputs: bool = False
    train_only: TrainOnly = field(default_factory=dict)
    ones: Collection[LeafAxis] = ()
    loops: tuple[Call, Sequence[FunctionType]] | None = None


def capture_graph(
    model: nn.Module, calls: Sequence[Call], dynamic_shapes: DynamicShapes, *, verify: bool,
    expected: RunResult | None = None, around: Surroundings = Surroundings(),
) -> PreparedGraph:
    """Captures ``model`` as one graph by the first rung whose outputs equal the model's in every one of ``calls``.

    Args:
        model: the module.
        calls: the calls that its graph must compute.
        dynamic_shapes: see ``capture``.
        verify: compare the outputs; otherwise the first rung that captures the module is taken.
        expected: the outcome of the only call, if it is known.
        around: what is known of the whole model.

    Returns: the graph, with a report of the capture.

    Raises: CaptureError with the reason of every rung, or if the calls need several graphs.
    """
    reasons: list[str] = []
    example = _example(model, calls)
    for rung in (BUILT,) if takes_packed(model, example) else RUNGS:
        on_rung = partial(_on_rung, rung, model, dynamic_shapes=dynamic_shapes, around=around, reasons=tuple(reasons))
        try:
            started = time.perf_counter()
            graph, source = on_rung(call=example)
            capture_s = time.perf_counter() - started
        except OUT_OF_MEMORY:
            raise
        except Exception as error:  # whatever torch refuses, the next rung may take
            reasons.append(str(error) if isinstance(error, CaptureError) else f"{rung}: {first_line(error)}")
            continue
        if not verify:
            return graph
        verified = partial(_verified, model, calls=calls, expected=expected)
        try:
            started = time.perf_counter()
            graph = verified(graph)
            cost_s = (time.perf_counter() - started) * (1 if expected is None else 2) / len(calls)
            if source is None:
                return graph
            trying = partial(try_other_sizes, model, cost_s=cost_s, budget_s=max(LEAST_S, TIME_SHARE * capture_s),
                             ones=around.ones, compared=calls)
            return _at_other_sizes(graph, source, trying, on_rung, verified)
        except OUT_OF_MEMORY:
            raise
        except Exception as error:  # whatever a capture does wrong, the next rung may do right
            difference = first_difference(model, graph, calls)
            where = "" if difference is None else f"; the first module to differ is {difference}"
            reasons.append(f"{rung}: {error if isinstance(error, QtkError) else first_line(error)}{where}")
    raise CaptureError(f"{type(model).__name__} cannot be captured as one graph: " + "\n  ".join(reasons))


def _example(model: nn.Module, calls: Sequence[Call]) -> Call:
    """The largest call, with rows. Raises: CaptureError if the module, or the calls, can have no graph."""
    if isinstance(model, torch.jit.ScriptModule):
        raise CaptureError(
            f"{model.original_name} is a ScriptModule, whose code torch.export cannot read; pass the module that it "
            "was scripted or traced from"
        )
    signature = signature_of(model)
    if len({call_kind(signature, call.args, call.kwargs) for call in calls}) > 1:
        raise CaptureError(
            f"{type(model).__name__} is called with arguments of several kinds (ranks, dtypes, None or a tensor)"
        )
    example = max(calls, key=lambda call: call.numel)
    if example.numel == 0:
        with restored(model):
            example = with_rows(model.eval(), example)
    return example


def _at_other_sizes(
    graph: PreparedGraph, source: Call,
    trying: Callable[[PreparedGraph, Call], tuple[frozenset[LeafAxis], Call | None]],
    on_rung: Callable[..., tuple[PreparedGraph, Call | None]], verified: Callable[[PreparedGraph], PreparedGraph],
) -> PreparedGraph:
    """The graph whose axes are free as far as it equals the model at other sizes.

    Args:
        graph: equal to the model at the sizes of the example.
        source: the call that it was exported with.
        trying: compares a graph with the model at other sizes.
        on_rung: captures the model again.
        verified: compares a graph with the model in all calls.
    """
    unfree, longer = trying(graph, source)
    if longer is not None:
        with suppress(Exception):  # then the axes of length 1 stay so
            freed, _ = on_rung(call=longer)
            graph, source = verified(freed), longer
            unfree, _ = trying(graph, source)
    if unfree:
        fixed, _ = on_rung(call=source, unfree=unfree)
        fixed.meta[SIZES] = graph.sizes
        fixed.meta[REPORT] = replace(fixed.report, reasons=graph.report.reasons)
        graph = verified(fixed)
    return graph


def _verified(
    model: nn.Module, graph: PreparedGraph, *, calls: Sequence[Call], expected: RunResult | None
) -> PreparedGraph:
    """``graph``, with the difference in its report. Raises: as ``difference_over_calls``."""
    graph.meta[REPORT] = replace(graph.report, eval_difference=max(
        difference_over_calls(model, graph, call.args, call.kwargs, expected=expected) for call in calls))
    return graph


def _on_rung(
    rung: str, model: nn.Module, *, call: Call, dynamic_shapes: DynamicShapes, around: Surroundings,
    reasons: tuple[str, ...], unfree: Collection[LeafAxis] = (),
) -> tuple[PreparedGraph, Call | None]:
    """The graph, and the call that it was exported with; ``None`` if it was not. ``reasons``: of the rungs before."""
    place, train_only = around.place, around.train_only
    with restored(model):
        source, sizes, model = None, ServedSizes(place=place), model.eval()
        names: Mapping[LeafAxis, str] = {}
        known: Collection[int] = ()
        if rung == BUILT:
            graph, report = build_packed(model, call, place), PrepareReport(rung, True, True)
        else:
            capturing = partial(capture, model, call.args, call.kwargs, rungs=(rung,), owns_inputs=around.owns_inputs,
                                unfree=unfree)
            known_call, functions = around.loops or (None, ())
            with (
                as_ops(model, train_only),
                scans_as_ops(functions if call is known_call else loops_of(model, call)) as scans,
            ):
                captured, known = _with_known_inputs(model, call, capturing, dynamic_shapes,
                                                     can=not place and rung == RUNGS[0])
            graph, swaps = canonicalize(captured.program, model, PreparedGraph, place=place, train_only=train_only,
                                        scans=scans)
            report = PrepareReport(rung, True, captured.dynamic, captured.reasons, swaps)
            source = Call(*distinct((captured.args, captured.kwargs)), None)
            sizes, names = replace(sizes, asked=captured.asked), captured.names
        closed: tuple[str, ...] = found_where(
            {Trait.COMPOSITES}, contents(graph.graph.nodes), lambda: open_composites(graph), ())
        graph.meta[SIGNATURE] = inspect.signature(model.forward)
        graph.meta[KIND] = call_kind(graph.meta[SIGNATURE], call.args, call.kwargs)
        graph.meta[ATTRIBUTES], graph.meta[SIZES] = PlainAttributes(model), sizes
        graph.sign()
        if known and source is not None:
            graph.meta[SIZES] = replace(sizes, values=_values_by_input(graph, source, known))
            graph.meta[KIND] = graph.meta[KIND], repr(graph.sizes.values)
        if names and source is not None:
            graph.meta[SIZES] = replace(graph.sizes, names=names_by_input(graph, source, names))
        written = [f"{rung}: {graph.sizes.written}"] if known else []
        graph.meta[REPORT] = replace(report, reasons=(*reasons, *written, *report.reasons),
                                     unknown_ops=unknown_ops(graph), opaque_parts=closed)
        return graph, source


def _with_known_inputs(
    model: nn.Module, call: Call, capturing: Callable[..., Capture], dynamic_shapes: DynamicShapes, *, can: bool
) -> tuple[Capture, tuple[int, ...]]:
    """Captures; if that fails and ``can`` is set, captures with the values of ``known_inputs`` in the graph.

    Returns: the capture, and the leaves whose values are in the graph.

    Raises: CaptureError of the capture without, if that does not help.
    """
    try:
        return capturing(dynamic_shapes=dynamic_shapes), ()
    except CaptureError:
        def captured(known: Collection[int], shapes: DynamicShapes = None) -> Capture | None:
            with suppress(CaptureError), written_in(model, call, known):
                return capturing(dynamic_shapes=shapes, known=known)
            return None

        known = known_inputs(model, call, lambda leaves: captured(leaves) is not None) if can else ()
        found = captured(known, dynamic_shapes) if known else None
        if found is None:
            raise
        return found, known


def _values_by_input(graph: PreparedGraph, call: Call, known: Collection[int]) -> dict[str, object]:
    leaves = pytree.tree_leaves((call.args, call.kwargs))
    names = names_by_input(graph, call, {(number, 0): "" for number in known})
    return {name: leaves[number].tolist() for (name, _), number in zip(names, known, strict=True)}
