"""Where a captured graph leaves the path of the module it was captured from."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, fx, nn

from qtk.capture.calls import Call, record_calls
from qtk.capture.signature import input_leaves
from qtk.capture.untouched import untouched
from qtk.capture.verify_prepared import tensor_difference
from qtk.errors import VerificationError
from qtk.graph.captured_graph import CapturedGraph
from qtk.graph.sites import GRAPH_PATH, join, label


def first_difference(original: nn.Module, graph: CapturedGraph, call: Call) -> str | None:
    """The first submodule whose output differs in the graph, in the order they finish, and by how much.

    ``None`` if no submodule that returns one tensor shows it.
    """
    children = [module for module in original.modules() if module is not original]
    innermost = [module for module in children if not list(module.children())]
    with untouched(original), untouched(graph), torch.no_grad():
        calls = record_calls(original.eval(), [call], of=innermost)
        values = _values(graph.eval(), call)
    paths = {module: path for path, module in original.named_modules()}
    place = label(graph.graph.output_node(), GRAPH_PATH) or ""
    for module, recorded in calls.items():
        expected, found = recorded[0].output, values.get(paths[module])
        if isinstance(expected, Tensor) and isinstance(found, Tensor):
            try:
                tensor_difference("its output", expected, found)
            except VerificationError as error:
                return f"{join(place, paths[module])}: {error}"
    return None


def _values(graph: CapturedGraph, call: Call) -> dict[str, Any]:
    """What the last op of every module computes, at its first call."""
    interpreter = _Recorder(graph)
    interpreter.run(*input_leaves(graph, call.args, call.kwargs))
    return interpreter.values


class _Recorder(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.values: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        stack = [(key, entry[0]) for key, entry in (n.meta.get("nn_module_stack") or {}).items()]
        if stack and not re.search(r"@\d", "".join(stack[-1])):  # the mark of a later call, in the key or in the path
            self.values[stack[-1][1]] = value
        return value

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        return next(self.args_iter)
