"""Steps: what a transform did to a model, as values that can be stored and repeated on other weights."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from qtk.capture.prepared_model import PreparedModel
from qtk.graph.graphs import meta_of
from qtk.transforms.graph_editor import GraphEditor
from qtk.transforms.named_tensors import NamedTensors

STEPS = "qtk_steps"
"""Key of a prepared model's ``meta``: the steps made on it, in order."""

State = MutableMapping[str, Tensor]
"""Name → tensor of a float model; a tied tensor has one name, its first."""


class Step(Protocol):
    """One change of a model: of its graphs, and of its parameters as a function of their values before."""

    def edit(self, editor: GraphEditor) -> None:
        """Edits the graphs, in which new parameters need no value yet."""

    def update(self, state: State) -> None:
        """Turns the parameters before the step into the parameters after it: replaces, adds and deletes entries."""


@dataclass(frozen=True, slots=True, eq=False)
class ScaleParameter:
    """A parameter times a factor.

    Args:
        parameter: its name.
        factor: broadcastable to it, float64.
    """

    parameter: str
    factor: Tensor

    def edit(self, editor: GraphEditor) -> None:
        """Leaves the graphs as they are."""

    def update(self, state: State) -> None:
        """Multiplies in float64 and rounds once."""
        old = state[self.parameter]
        state[self.parameter] = (old.double() * self.factor.to(old.device)).to(old.dtype)


@dataclass(frozen=True, slots=True)
class RemoveParameters:
    """Removes parameters and buffers that no graph reads any more.

    Args:
        names: their names.
    """

    names: tuple[str, ...]

    def edit(self, editor: GraphEditor) -> None:
        """Leaves the graphs as they are."""

    def update(self, state: State) -> None:
        """Deletes the entries."""
        for name in self.names:
            state.pop(name, None)


def steps_of(model: nn.Module) -> tuple[Step, ...]:
    """The steps made on a prepared model."""
    steps: tuple[Step, ...] = meta_of(model).get(STEPS, ())
    return steps


def op_changes(model: nn.Module) -> list[str]:
    """The kinds of steps made on a prepared model that change more than numbers of parameters."""
    return list(dict.fromkeys(type(step).__name__ for step in steps_of(model) if not isinstance(step, ScaleParameter)))


def is_transformed(model: PreparedModel) -> bool:
    """Says whether ``make`` has run on a prepared model, even without a step."""
    return STEPS in model.meta


def make(model: PreparedModel, steps: Sequence[Step]) -> None:
    """Makes ``steps`` in order and adds them to the model's steps. Changes ``model``; no tensor is written to."""
    model.meta[STEPS] = (*steps_of(model), *steps)
    if not steps:
        return
    editor = GraphEditor(model)
    for step in steps:
        step.edit(editor)
    editor.close()
    members = NamedTensors(model)
    before = members.tensors()
    state = dict(before)
    with torch.no_grad():
        for step in steps:
            step.update(state)
    members.replace({name: tensor for name, tensor in state.items() if tensor is not before.get(name)})
    for name in before.keys() - state.keys():
        members.remove(name)
