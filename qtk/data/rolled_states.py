"""Hands the states of a model to its next call, while data run through it.

A state is an input that is an output of the call before (``states_of``), or a buffer that forward writes. The first is
passed to the next call here; a buffer goes on by itself, and is as before when the data end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from qtk.calls.inputs import input_leaves
from qtk.calls.signature import input_names
from qtk.calls.states import grown_axes
from qtk.data.sequences import Sequences
from qtk.errors import CalibrationError
from qtk.graph.captured_graph import CapturedGraph
from qtk.graph.graphs import returned_states, roots, states_of
from qtk.graph.written_buffers import written_buffers
from qtk.nn.kept_buffers import BufferPlace, BufferValues, buffer_places, detach_buffers
from qtk.torch_private import call_structure, pytree

NAME_STATES = ("name the inputs that are outputs of the call before, QuantSim(…, states={'h': 1}), or register what "
               "forward keeps as a buffer")


def written_places(model: nn.Module) -> list[BufferPlace]:
    """Where the buffers are that forward may write: buffers that graphs write, and all outside of graphs."""
    captured = roots(model)
    places = [
        (graph.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
        for graph in captured.values() for name in written_buffers(graph.graph)
    ]
    inside = {module for graph in captured.values() for module in graph.modules()}
    places += [(module, name) for module, name in buffer_places(model) if module not in inside]
    return list(dict.fromkeys(places))


class RolledStates:
    """The states between the batches of a run: a batch begins with the states that the batch before returned.

    The first batch, and each at which a sequence begins, keeps the states that it brings along, and finds the buffers
    as they were at first.

    Args:
        model: a prepared model; one without states is left alone.
        data: the batches; all are the steps of one sequence, unless they are ``Sequences``.

    Raises: CalibrationError for sequences without a model with states.
    """

    def __init__(self, model: nn.Module, data: object) -> None:
        self._states = states_of(model)
        self._grown = {graph: grown_axes(graph) for graph in roots(model).values()} if self._states else {}
        self._reset = data.reset if isinstance(data, Sequences) else None
        self._steps = 0
        self._carried: dict[str, Tensor] | None = None
        self._returned: dict[str, Tensor] | None = None
        self._places = written_places(model)
        self._first: BufferValues | None = None
        if self._reset is not None and not self._states and not self._places:
            raise CalibrationError("qtk.Sequences and reset say where a sequence begins, and the model has no states; "
                                   f"{NAME_STATES}")

    @contextmanager
    def listening(self) -> Iterator[None]:
        """While the body runs, the graph, or the variant that a call is of, takes the carried states.

        Afterwards the buffers are as before.
        """
        handles = [
            handle for graph in self._grown for handle in (
                graph.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True),
                graph.register_forward_hook(self._leave),
            )
        ]
        self._first = BufferValues(self._places)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._first.restore()

    def begin(self, batch: object) -> None:
        """To be called in front of each batch."""
        is_first = self._is_first(batch)
        self._carried, self._returned = None if is_first else self._returned, None
        if is_first and self._steps and self._first is not None:
            self._first.restore()
        self._steps += 1
        detach_buffers(self._places)  # a backward pass goes through one batch

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
        leaves, structure = input_leaves(graph.graph, args, kwargs), call_structure(graph.graph)
        names, grown = input_names(graph), self._grown[graph]
        for name, state in self._carried.items():
            if name not in names:
                continue  # a variant that takes no states
            given = leaves[names.index(name)]
            assert isinstance(given, Tensor)
            if any(size != state.shape[axis] for axis, size in enumerate(given.shape) if axis not in grown[name]):
                raise CalibrationError(
                    f"the state {name} is {list(given.shape)} in this batch, and output {self._states[name]} of the "
                    f"batch before is {list(state.shape)}; begin a new sequence where the streams change, "
                    "qtk.Sequences(data, reset=…)"
                )
            leaves[names.index(name)] = state.to(given.device)
        if structure is None:
            return tuple(leaves), {}
        taken: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_unflatten(leaves, structure.in_spec)
        return taken

    def _leave(self, graph: nn.Module, args: object, result: object) -> None:
        if self._returned is None:
            assert isinstance(graph, CapturedGraph)
            outputs = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
            with torch.no_grad():
                self._returned = {name: outputs[index].detach() for name, index in returned_states(graph).items()}
