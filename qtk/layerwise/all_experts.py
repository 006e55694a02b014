"""Sends every token to every expert, for the statistics of the experts' inputs alone.

A router chooses experts by the order of its scores (top-k). All that its choice decides, up to the inputs of the
experts, is computed once more for each of several choices that were not made by the scores: all tokens to the first k
experts, then to the next k, and so on. From the outputs of the experts on, the model follows the router's choice.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, fx

from qtk.errors import CalibrationError
from qtk.graph.flow import ancestors
from qtk.graph.sites import is_float
from qtk.layerwise.decisions import axis_of, decided_as, decides
from qtk.layerwise.live_values import Values
from qtk.layerwise.path_evaluator import PathEvaluator
from qtk.layerwise.sibling_experts import chooses_rows, has_rows_by_data
from qtk.moments.stack_use import StackUse
from qtk.operators.targets import aten_name

Key = TypeVar("Key", bound=Hashable)

ROUTERS = frozenset(("topk", "max", "argmax"))
"""Ops whose indices choose experts."""


@dataclass(frozen=True, slots=True, eq=False)
class Router:
    """The op whose indices choose the rows of a layer, and the ops between it and the layer's input.

    Args:
        op: the op.
        between: in the order of the graph.
    """

    op: fx.Node
    between: tuple[fx.Node, ...]

    @property
    def ops(self) -> tuple[fx.Node, ...]:
        """The ops that run once more for each choice of experts; the first has the choice for its result."""
        return self.op, *self.between

    def choices(self, paths: PathEvaluator, values: Values) -> Iterator[Values]:
        """The values of the graph with other choices of experts, by which every token is at every expert in turn.

        Args:
            paths: of the walk.
            values: by the choice of the router.
        """
        first = values[self.op][0]
        indices = first if isinstance(first, Tensor) else first[1]
        scores = [paths.value(self.op.all_input_nodes[0], values, path) for path in range(len(paths.quantized))]
        axis = axis_of(self.op)
        experts, is_kept = scores[0].shape[axis], indices.ndim == scores[0].ndim
        at_once = indices.shape[axis] if is_kept else 1
        for begin in range(0, experts, at_once):
            index = (torch.arange(at_once, device=indices.device) + begin) % experts
            if is_kept:
                index = index.reshape([at_once if each == axis % indices.ndim else 1 for each in range(indices.ndim)])
            chosen = index.expand_as(indices).contiguous()
            found = {id(x): decided_as(chosen if isinstance(first, Tensor) else (None, chosen), self.op, x)
                     for x in scores}
            changed = {**values, self.op: tuple(found[id(x)] for x in scores)}
            for node in self.between:
                paths.run(node, changed)
            yield changed


def routers(graph: fx.Graph, inputs: Mapping[Key, tuple[fx.Node, StackUse | None]]) -> dict[Key, Router]:
    """The router of each input of a layer whose rows one chooses.

    Args:
        graph: the graph.
        inputs: key of an input → its value, and how a stack of matrices is multiplied with it.

    Raises: CalibrationError if there is none.
    """
    order = {node: index for index, node in enumerate(graph.nodes)}
    found: dict[Key, Router] = {}
    for key, (data, use) in inputs.items():
        choosing = [] if use is None else [read for read in use.reads if read is not data]
        ops = [op for op in _deciding(choosing or _indices(data)) if aten_name(op.target) in ROUTERS]
        if ops:
            op = max(ops, key=order.__getitem__)
            needed, decided = ancestors([data, *choosing]) | {data, *choosing}, {op}
            for node in graph.nodes:
                if not decided.isdisjoint(node.all_input_nodes):
                    decided.add(node)
            found[key] = Router(op, tuple(node for node in graph.nodes if node in (decided & needed) - {op}))
    if not found:
        raise CalibrationError("calibrate_all_experts: the rows of no layer are chosen by a router (top-k or argmax of "
                               "scores) in the same graph; leave it out")
    return found


def _deciding(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nearest ops behind ``nodes`` that decide by the order of real numbers; ids of experts may be sorted."""
    pending, seen, found = list(nodes), set[fx.Node](), set[fx.Node]()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if decides(node) and is_float(node.all_input_nodes[0]):
            found.add(node)
        else:
            pending += node.all_input_nodes
    return found


def _indices(data: fx.Node) -> list[fx.Node]:
    """The operands by which the rows of a value were chosen, where data decide how many they are."""
    pending, seen, found = [data], set[fx.Node](), list[fx.Node]()
    while pending:
        node = pending.pop()
        if node in seen or not has_rows_by_data(node, is_float=True):
            continue
        seen.add(node)
        if chooses_rows(node):
            found += [read for read in node.all_input_nodes if not is_float(read)]
        else:
            pending += node.all_input_nodes
    return found
