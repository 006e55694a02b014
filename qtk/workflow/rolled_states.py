"""Hands the states that a model returns to its next call, while data run through it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from qtk.capture.states import states_of
from qtk.errors import CalibrationError
from qtk.graph.captured_graph import CapturedGraph
from qtk.graph.graphs import roots
from qtk.torch_private import pytree

Reset: TypeAlias = int | Callable[[Any], bool]
"""Where a sequence begins: every so many batches, or a function from a batch that says whether it is a first one."""


class RolledStates:
    """The states between the batches of a run: every call of a batch begins with those that the batch before returned.

    The first batch, and each at which a sequence begins, keeps the states that it brings along.

    Args:
        model: a prepared model; one without states is left alone.
        reset: where a sequence begins; ``None``: all batches are the steps of one.
    """

    def __init__(self, model: nn.Module, reset: Reset | None = None) -> None:
        self._states = states_of(model)
        self._graph = roots(model).get("")
        self._reset = reset
        self._steps = 0
        self._carried: dict[str, Tensor] | None = None
        self._returned: dict[str, Tensor] | None = None
        if reset is not None and not self._states:
            raise CalibrationError("reset says where a sequence begins, and the model has no states; name them, "
                                   "QuantSim(…, states={'h': 1})")
        if isinstance(reset, int) and reset < 1:
            raise CalibrationError(f"reset must be at least 1, the number of batches of a sequence; got {reset}")

    @contextmanager
    def listening(self) -> Iterator[None]:
        """While the body runs, the graph takes the carried states."""
        if not self._states:
            yield
            return
        assert self._graph is not None
        handles = [
            self._graph.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True),
            self._graph.register_forward_hook(self._leave),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def begin(self, batch: object) -> None:
        """To be called in front of each batch."""
        self._carried, self._returned = None if self._is_first(batch) else self._returned, None
        self._steps += 1

    def _is_first(self, batch: object) -> bool:
        if callable(self._reset):
            return self._reset(batch)
        return self._reset is not None and self._steps % self._reset == 0

    def _enter(
        self, graph: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._carried is None:
            return None
        assert isinstance(graph, CapturedGraph)
        leaves, structure = pytree.tree_flatten((args, kwargs))  # as the graph takes them
        names = [str(node.target) for node in graph.graph.find_nodes(op="placeholder")]
        for name, state in self._carried.items():
            given = leaves[names.index(name)]
            if given.shape != state.shape:
                raise CalibrationError(
                    f"the state {name} is {list(given.shape)} in this batch, and output {self._states[name]} of the "
                    f"batch before is {list(state.shape)}; begin a new sequence where the streams change, reset=…"
                )
            leaves[names.index(name)] = state.to(given.device)
        taken: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_unflatten(leaves, structure)
        return taken

    def _leave(self, graph: nn.Module, args: object, result: object) -> None:
        if self._returned is None:
            outputs = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
            with torch.no_grad():
                self._returned = {name: outputs[index].detach() for name, index in self._states.items()}
