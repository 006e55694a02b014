"""Finds the first submodule whose output differs between a model and its captured graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qtk.calls.call_recording import record_calls
from qtk.calls.calls import Call
from qtk.calls.inputs import input_leaves
from qtk.capture.restored import restored
from qtk.capture.verify_prepared import tensor_difference
from qtk.errors import OUT_OF_MEMORY, VerificationError
from qtk.graph.captured_graph import CapturedGraph
from qtk.graph.evaluate import evaluate_node
from qtk.graph.sites import GRAPH_PATH, join, label
from qtk.operators.targets import module_calls


def first_difference(original: nn.Module, graph: CapturedGraph, calls: Sequence[Call]) -> str | None:
    """Path of the first innermost submodule whose output differs in the graph, with the difference, as text.

    ``None`` if none differs, in any of ``calls``, among the modules that return one tensor, or the graph does not run.
    """
    try:
        return next((text for call in calls if (text := _in_call(original, graph, call))), None)
    except OUT_OF_MEMORY:
        raise
    except Exception:
        return None


def _in_call(original: nn.Module, graph: CapturedGraph, call: Call) -> str | None:
    children = [module for module in original.modules() if module is not original]
    innermost = [module for module in children if not list(module.children())]
    with restored(original), restored(graph), torch.no_grad():
        calls = record_calls(original.eval(), [call], of=innermost)
        values = _values(graph.eval(), call)
    paths = {module: path for path, module in original.named_modules()}
    place = label(graph.graph.output_node(), GRAPH_PATH) or ""
    for module, recorded in calls.items():
        expected, actual = recorded[0].output, values.get(paths[module])
        if isinstance(expected, Tensor) and isinstance(actual, Tensor):
            try:
                tensor_difference("its output", expected, actual)
            except VerificationError as error:
                return f"{join(place, paths[module])}: {error}"
    return None


def _values(graph: CapturedGraph, call: Call) -> dict[str, Any]:
    """The value of the last op of every module, at the module's first call."""
    inputs = input_leaves(graph.graph, call.args, call.kwargs)
    values = dict(zip(graph.graph.find_nodes(op="placeholder"), inputs, strict=True))
    of_modules: dict[str, Any] = {}
    for node in graph.graph.nodes:
        if node.op not in ("placeholder", "output"):
            values[node] = evaluate_node(node, values.__getitem__)
            around = module_calls(node)
            if around and around[-1].is_first:
                of_modules[around[-1].path] = values[node]
    return of_modules
