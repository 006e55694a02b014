"""Recurrent nets as torch's fused kernel, or as a loop over cells whose values can be observed and quantized.

Parameters come in as arguments, so that they stay edges of the graph around. A *step* is one layer in one direction.
T: time, N: batch, I: input, H: hidden, P: what a step hands out (H, or the size of its projection).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qtk.nn.elementwise import Linear
from qtk.nn.recurrent_cells import GruCell, LstmCell, RnnCell
from qtk.nn.tap import all_idle
from qtk.torch_private import rnn_kernels as kernels

Kind = Literal["lstm", "gru", "rnn_tanh", "rnn_relu"]

CELLS: Mapping[str, Callable[[], nn.Module]] = {
    "lstm": LstmCell,
    "gru": GruCell,
    "rnn_tanh": lambda: RnnCell(nn.Tanh()),
    "rnn_relu": lambda: RnnCell(nn.ReLU()),
}
SEQUENCES = {"lstm": kernels.lstm, "gru": kernels.gru, "rnn_tanh": kernels.rnn_tanh, "rnn_relu": kernels.rnn_relu}
SINGLE_STEPS = {"lstm": kernels.lstm_cell, "gru": kernels.gru_cell, "rnn_tanh": kernels.rnn_tanh_cell,
                "rnn_relu": kernels.rnn_relu_cell}

Part = tuple[nn.Module, tuple[Tensor | None, ...]]
"""A module to be captured by itself, and what it is called with."""


class Step(nn.Module):
    """One layer in one direction: the product with the inputs of all time steps, and the cell for each of them."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.projection: nn.Module = Linear()
        self.cell: nn.Module = CELLS[kind]()

    def parts(self, x: Tensor, states: Sequence[Tensor], parameters: _Parameters) -> dict[str, Part]:
        """Both modules by name; ``x`` [..., I], states [N, …]."""
        projected = x.new_zeros(states[0].shape[0], parameters.w_ih.shape[0])
        return {
            "projection": (self.projection, (x, parameters.w_ih, parameters.b_ih)),
            "cell": (self.cell, (projected, *states, *parameters.of_cell)),
        }


class Recurrent(nn.Module):
    """``nn.LSTM``, ``nn.GRU`` or ``nn.RNN`` without parameters of its own.

    Runs torch's fused kernel while every tap inside is idle, else step by step; the two differ by float rounding.

    Args:
        kind: which net.
        num_layers: each fed by the one before.
        bidirectional: every layer has a second step that walks backwards.
        batch_first: input and output are [N, T, …] instead of [T, N, …].
        dropout: probability that an element between two layers is dropped in train mode.
        has_biases: whether there are any.
        projected: of an LSTM, whether the hidden state is projected (``proj_size``).
    """

    def __init__(
        self,
        kind: Kind,
        *,
        num_layers: int = 1,
        bidirectional: bool = False,
        batch_first: bool = False,
        dropout: float = 0.0,
        has_biases: bool = True,
        projected: bool = False,
    ) -> None:
        super().__init__()
        self.kind: Kind = kind
        self.num_layers = num_layers
        self.bidirectional = bidirectional
        self.batch_first = batch_first
        self.dropout = dropout
        self.has_biases = has_biases
        self.projected = projected
        for name in self.step_names:
            self.add_module(name, Step(kind))

    @property
    def step_names(self) -> list[str]:
        """In order: ``l0``, ``l0_reverse``, ``l1`` and so on."""
        directions = ("", "_reverse") if self.bidirectional else ("",)
        return [f"l{layer}{direction}" for layer in range(self.num_layers) for direction in directions]

    @property
    def joined_parts(self) -> list[tuple[str, str]]:
        """Parts whose first results are joined into one tensor: the cells of both directions of a layer."""
        layers = range(self.num_layers if self.bidirectional else 0)
        return [(f"l{layer}.cell", f"l{layer}_reverse.cell") for layer in layers]

    def forward(
        self,
        x: Tensor,
        states: Sequence[Tensor],
        weights: Sequence[Tensor],
        biases: Sequence[Tensor],
        batch_sizes: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """All outputs, and the last state of every step.

        Shape: x [T, N, I] or [N, T, I]; packed (with batch_sizes [T]) [ΣN, I]. states: h0 [steps, N, P] and, of an
        LSTM, c0 [steps, N, H]. weights, step by step: w_ih [gates·H, I], w_hh [gates·H, P] and, projected, w_hr
        [P, H]; biases: b_ih, b_hh. Results: x with directions·P features, then as states.
        """
        if all_idle(self):
            return self._fused(x, states, weights, biases, batch_sizes)
        parameters = list(self._parameters_of_steps(weights, biases))
        if batch_sizes is None and self.batch_first:
            x = x.transpose(0, 1)
        sizes = None if batch_sizes is None else [int(size) for size in batch_sizes]
        last: list[tuple[Tensor, ...]] = []
        directions = 2 if self.bidirectional else 1
        for layer in range(self.num_layers):
            if layer and self.training and self.dropout:
                x = F.dropout(x, self.dropout)
            outputs = []
            for direction in range(directions):
                index = layer * directions + direction
                step = self.get_submodule(self.step_names[index])
                assert isinstance(step, Step)
                step_states = tuple(state[index] for state in states)
                output, state = _walk(step, x, step_states, parameters[index], sizes, backwards=direction == 1)
                outputs.append(output)
                last.append(state)
            x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        if batch_sizes is None and self.batch_first:
            x = x.transpose(0, 1)
        return (x, *(torch.stack(states) for states in zip(*last, strict=True)))

    def parts(
        self,
        x: Tensor,
        states: Sequence[Tensor],
        weights: Sequence[Tensor],
        biases: Sequence[Tensor],
        batch_sizes: Tensor | None = None,
    ) -> dict[str, Part]:
        """The modules to be captured by themselves, by their names in this one, and what they are called with here."""
        parts_by_name: dict[str, Part] = {}
        for index, parameters in enumerate(self._parameters_of_steps(weights, biases)):
            name = self.step_names[index]
            step = self.get_submodule(name)
            assert isinstance(step, Step)
            step_input = x.new_zeros(*x.shape[:-1], parameters.w_ih.shape[1])
            parts = step.parts(step_input, [state[index] for state in states], parameters)
            parts_by_name |= {f"{name}.{part}": value for part, value in parts.items()}
        return parts_by_name

    def _fused(
        self,
        x: Tensor,
        states: Sequence[Tensor],
        weights: Sequence[Tensor],
        biases: Sequence[Tensor],
        batch_sizes: Tensor | None,
    ) -> tuple[Tensor, ...]:
        flat = [tensor for p in self._parameters_of_steps(weights, biases) for tensor in p.flat]
        start = list(states) if self.kind == "lstm" else states[0]
        how = (self.has_biases, self.num_layers, self.dropout, self.training, self.bidirectional)
        run: Any = SEQUENCES[self.kind]
        result: tuple[Tensor, ...] = (
            run(x, start, flat, *how, self.batch_first) if batch_sizes is None
            else run(x, batch_sizes, start, flat, *how)
        )
        return result

    def _parameters_of_steps(self, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Iterator[_Parameters]:
        return _by_step(weights, biases, 3 if self.projected else 2)

    def extra_repr(self) -> str:
        return (f"{self.kind}, num_layers={self.num_layers}, bidirectional={self.bidirectional}, "
                f"batch_first={self.batch_first}, dropout={self.dropout}, has_biases={self.has_biases}, "
                f"projected={self.projected}")


class RecurrentCell(nn.Module):
    """``nn.LSTMCell``, ``nn.GRUCell`` or ``nn.RNNCell`` without parameters of its own; fused like ``Recurrent``.

    Args:
        kind: which cell.
        has_biases: whether there are any.
    """

    def __init__(self, kind: Kind, *, has_biases: bool = True) -> None:
        super().__init__()
        self.kind: Kind = kind
        self.has_biases = has_biases
        self.step = Step(kind)

    def forward(
        self, x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """The next states. Shape: x [N, I], states [N, H] each; weights, biases as ``Recurrent``, of one step."""
        (parameters,) = _by_step(weights, biases, 2)
        if all_idle(self):
            start = list(states) if self.kind == "lstm" else states[0]
            run: Any = SINGLE_STEPS[self.kind]
            following = run(x, start, *parameters.flat)
            return following if self.kind == "lstm" else (following,)
        projected = self.step.projection(x, parameters.w_ih, parameters.b_ih)
        result: tuple[Tensor, ...] = self.step.cell(projected, *states, *parameters.of_cell)
        return result

    def parts(
        self, x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor]
    ) -> dict[str, Part]:
        """As ``Recurrent.parts``."""
        (parameters,) = _by_step(weights, biases, 2)
        return {f"step.{name}": part for name, part in self.step.parts(x, states, parameters).items()}

    def extra_repr(self) -> str:
        return f"{self.kind}, has_biases={self.has_biases}"


class _Parameters:
    """The tensors of one step."""

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> None:
        self.w_ih, self.w_hh, *projection = weights
        self.w_hr = projection[0] if projection else None
        self.b_ih: Tensor | None = biases[0] if biases else None
        self.b_hh: Tensor | None = biases[1] if biases else None

    @property
    def flat(self) -> list[Tensor]:
        """In torch's order."""
        return [t for t in (self.w_ih, self.w_hh, self.b_ih, self.b_hh, self.w_hr) if t is not None]

    @property
    def of_cell(self) -> tuple[Tensor | None, ...]:
        parameters = (self.w_hh, self.b_hh)
        return parameters if self.w_hr is None else (*parameters, self.w_hr)


def _by_step(weights: Sequence[Tensor], biases: Sequence[Tensor], weights_per_step: int) -> Iterator[_Parameters]:
    for index, start in enumerate(range(0, len(weights), weights_per_step)):
        yield _Parameters(weights[start : start + weights_per_step], biases[2 * index : 2 * index + 2])


def _walk(
    step: Step,
    x: Tensor,
    states: tuple[Tensor, ...],
    parameters: _Parameters,
    sizes: list[int] | None,
    *,
    backwards: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The outputs of one step over time, and its last state.

    Packed sequences (``sizes``: how many are alive at each time, falling) are sorted by length, the longest first. On
    the way forward those that have ended keep their state; on the way back they join when their last element comes.
    """
    projected = step.projection(x, parameters.w_ih, parameters.b_ih)
    slices = projected.unbind(0) if sizes is None else projected.split(sizes)
    outputs: list[Tensor] = []
    for current in reversed(slices) if backwards else slices:
        alive = current.shape[0]
        if sizes is None or alive == states[0].shape[0]:
            states = step.cell(current, *states, *parameters.of_cell)
            outputs.append(states[0])
            continue
        moved = step.cell(current, *(state[:alive] for state in states), *parameters.of_cell)
        states = tuple(torch.cat([new, old[alive:]]) for new, old in zip(moved, states, strict=True))
        outputs.append(moved[0])
    if backwards:
        outputs.reverse()
    if not outputs:
        return x.new_zeros(*x.shape[:-1], states[0].shape[-1]), states
    return (torch.stack(outputs) if sizes is None else torch.cat(outputs)), states
