"""Graphs that run as functions: what ``torch.fx`` looks up at each call is looked up once, while nobody changes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from qtk.capture.bound_code import BoundCode, bound_code
from qtk.graph.captured_graph import BOUND, CapturedGraph
from qtk.graph.graphs import graphs

MOST_CALLS_LEFT = 16
"""Calls after which a graph that was often changed is bound again, at most."""
MOST_FUNCTIONS = 4
"""States of a graph whose functions are kept, at most; most states are modes of the graph."""


class Binding:
    """The functions of a graph, in its attribute ``BOUND``: written at the second call in a state, at later ones where
    states change often. A copy or pickle has nothing written yet.
    """

    def __init__(self) -> None:
        self._functions: list[tuple[bool, BoundCode, Callable[..., Any]]] = []
        self._lasting: BoundCode | None = None
        self._left, self._changes = 1, 0

    def function(self, graph: CapturedGraph) -> Callable[..., Any] | None:
        """Returns what a call runs in place of ``graph``; ``None`` if the graph itself."""
        gradients = torch.is_grad_enabled()
        for recorded, known, run in self._functions:
            if recorded is gradients and known.watch.holds():
                return run
        if self._left:
            self._left -= 1
            return None
        self._changes += 1
        self._left = min(self._changes, MOST_CALLS_LEFT)
        code = bound_code(graph, weights_once=False, gradients=gradients)
        if code is None:
            return None
        for nested in graphs(graph).values():
            binding_of(nested)
        run = code.function({})
        self._functions = [(gradients, code, run), *self._functions[: MOST_FUNCTIONS - 1]]
        return run

    def lasting(self, graph: CapturedGraph) -> BoundCode | None:
        """The code for a time in which nobody changes the model; ``None`` if the graph is left as it is."""
        if self._lasting is None or not self._lasting.watch.holds():
            self._lasting = bound_code(graph, weights_once=True, gradients=False)
        return self._lasting

    def __reduce__(self) -> tuple[type[Binding], tuple[()]]:
        return Binding, ()


def binding_of(graph: CapturedGraph) -> Binding:
    """The functions of a graph, outside of a time in which nobody changes the model."""
    found = vars(graph).setdefault(BOUND, Binding())
    return found.binding if isinstance(found, _Lasting) else found


class _Lasting:
    """What stands in ``BOUND`` for a time in which nobody changes the model. A copy or pickle is a ``Binding``."""

    def __init__(self, binding: Binding, simulated: dict[tuple[int, int], Tensor]) -> None:
        self.binding, self._simulated = binding, simulated
        self._runs: list[Callable[..., Any] | None] = []

    def function(self, graph: CapturedGraph) -> Callable[..., Any] | None:
        """As ``Binding``, but looked at once."""
        if torch.is_grad_enabled():
            return self.binding.function(graph)
        if not self._runs:  # most graphs inside others are written into these, and never called
            code = self.binding.lasting(graph)
            self._runs.append(None if code is None else code.function(self._simulated))
        return self._runs[0]

    def __reduce__(self) -> tuple[type[Binding], tuple[()]]:
        return Binding, ()


@contextmanager
def weights_once(model: nn.Module) -> Iterator[None]:
    """Runs the graphs of ``model`` as functions, each weight quantized once, while nobody changes the model.

    That is for what runs without gradients in the body; a model with hooks is left as it is.
    """
    simulated: dict[tuple[int, int], Tensor] = {}
    bound = [graph for graph in graphs(model).values() if not isinstance(vars(graph).get(BOUND), _Lasting)]
    for graph in bound:
        vars(graph)[BOUND] = _Lasting(binding_of(graph), simulated)
    try:
        yield
    finally:
        for graph in bound:
            vars(graph)[BOUND] = binding_of(graph)
