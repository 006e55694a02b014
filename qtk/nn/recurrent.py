"""Recurrent nets as torch's fused kernel, or as a loop over cells whose values can be observed and quantized.

Parameters are arguments, so that they stay edges of the outer graph. A ``TimeStep`` is one layer in one direction.
T: time, N: batch, I: input, H: hidden, P: output of a layer (H, or ``proj_size``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

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
"""A module that is captured as a graph of its own, and its arguments."""


SAMPLES = "one for each sample of the input"


class TimeStep(nn.Module):
    """One layer in one direction: the input projection of all time steps in one GEMM, and the cell of one time step."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.projection: nn.Module = Linear()
        self.cell: nn.Module = CELLS[kind]()

    def parts(self, x: Tensor, states: Sequence[Tensor], parameters: StepParameters) -> dict[str, Part]:
        """Both modules by name; ``x`` [..., I], states [N, …]."""
        projected = x.new_zeros(states[0].shape[0], parameters.w_ih.shape[0])
        return {
            "projection": (self.projection, (x, parameters.w_ih, parameters.b_ih)),
            "cell": (self.cell, (projected, *states, *parameters.of_cell)),
        }


class OverTime(Protocol):
    """Runs one ``TimeStep`` over all time steps; ``loop_over_time`` defines what it returns."""

    def __call__(
        self,
        step: TimeStep,
        x: Tensor,
        states: tuple[Tensor, ...],
        parameters: StepParameters,
        batch_sizes: Tensor | None,
        *,
        backwards: bool,
    ) -> tuple[Tensor, tuple[Tensor, ...]]: ...


class Recurrent(nn.Module):
    """Stateless ``nn.LSTM``, ``nn.GRU`` or ``nn.RNN``.

    Runs torch's fused kernel while no quantizer inside is active, else a loop over time; they differ by float rounding.
    ``over_time`` is that loop; an export replaces it, and the kernel for packed sequences, by ops of its own, which
    take padded sequences [T, N, I] and their lengths [N] in place of packed ones and their batch sizes.

    Args:
        kind: the kind of net.
        num_layers: number of stacked layers.
        bidirectional: every layer also runs backwards in time.
        batch_first: input and output are [N, T, …] instead of [T, N, …].
        dropout: dropout probability between layers in train mode.
        has_biases: whether biases are passed.
        projected: LSTM only: the hidden state is projected (``proj_size``).
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
        self.over_time: OverTime = loop_over_time
        self.packed_kernel: Callable[..., tuple[Tensor, ...]] | None = None
        for name in self.step_names:
            self.add_module(name, TimeStep(kind))

    @property
    def step_names(self) -> list[str]:
        """Names of the ``TimeStep`` submodules in order: ``l0``, ``l0_reverse``, ``l1`` and so on."""
        directions = ("", "_reverse") if self.bidirectional else ("",)
        return [f"l{layer}{direction}" for layer in range(self.num_layers) for direction in directions]

    @property
    def joined_parts(self) -> list[tuple[str, str]]:
        """Pairs of parts whose first outputs are concatenated: the cells of both directions of a layer."""
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
        """The outputs of the last layer, and the last state of every layer and direction.

        Shape: x [T, N, I] or [N, T, I]; packed (with batch_sizes [T]) [ΣN, I]. states: h0 [steps, N, P] and, of an
        LSTM, c0 [steps, N, H]. weights, step by step: w_ih [gates·H, I], w_hh [gates·H, P] and, projected, w_hr
        [P, H]; biases: b_ih, b_hh. Results: x with directions·P features, then as states.

        Raises: RuntimeError if the states are of another number of steps or samples.
        """
        _check_lengths(states, 0, len(self.step_names), "one for each layer and direction")
        if batch_sizes is None:
            _check_lengths(states, 1, x.shape[0 if self.batch_first else 1], SAMPLES)
        if all_idle(self):
            return self._fused(x, states, weights, biases, batch_sizes)
        parameters = list(self._parameters_of_steps(weights, biases))
        if batch_sizes is None and self.batch_first:
            x = x.transpose(0, 1)
        last: list[tuple[Tensor, ...]] = []
        directions = 2 if self.bidirectional else 1
        for layer in range(self.num_layers):
            if layer and self.training and self.dropout:
                x = F.dropout(x, self.dropout)
            outputs = []
            for direction in range(directions):
                index = layer * directions + direction
                step = self.get_submodule(self.step_names[index])
                assert isinstance(step, TimeStep)
                step_states = tuple(state[index] for state in states)
                output, state = self.over_time(
                    step, x, step_states, parameters[index], batch_sizes, backwards=direction == 1
                )
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
        """Submodule name → (module, its arguments): what is captured as graphs of their own."""
        parts_by_name: dict[str, Part] = {}
        for index, parameters in enumerate(self._parameters_of_steps(weights, biases)):
            name = self.step_names[index]
            step = self.get_submodule(name)
            assert isinstance(step, TimeStep)
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
        settings = (self.has_biases, self.num_layers, self.dropout, self.training, self.bidirectional)
        run: Any = SEQUENCES[self.kind]
        result: tuple[Tensor, ...] = (
            run(x, start, flat, *settings, self.batch_first) if batch_sizes is None
            else (self.packed_kernel or run)(x, batch_sizes, start, flat, *settings)
        )
        return result

    def _parameters_of_steps(self, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Iterator[StepParameters]:
        return _by_step(weights, biases, 3 if self.projected else 2)

    def extra_repr(self) -> str:
        return (f"{self.kind}, num_layers={self.num_layers}, bidirectional={self.bidirectional}, "
                f"batch_first={self.batch_first}, dropout={self.dropout}, has_biases={self.has_biases}, "
                f"projected={self.projected}")


class RecurrentCell(nn.Module):
    """Stateless ``nn.LSTMCell``, ``nn.GRUCell`` or ``nn.RNNCell``; fused as in ``Recurrent``.

    ``over_time`` is ``None``; an export may give it an op that runs the step as a sequence of one.

    Args:
        kind: the kind of cell.
        has_biases: whether biases are passed.
    """

    def __init__(self, kind: Kind, *, has_biases: bool = True) -> None:
        super().__init__()
        self.kind: Kind = kind
        self.has_biases = has_biases
        self.over_time: OverTime | None = None
        self.step = TimeStep(kind)

    def forward(
        self, x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """The next states. Shape: x [N, I], states [N, H] each; weights, biases as ``Recurrent``, of one step.

        Raises: RuntimeError if the states are of another number of samples.
        """
        _check_lengths(states, 0, x.shape[0], SAMPLES)
        (parameters,) = _by_step(weights, biases, 2)
        if all_idle(self):
            start = list(states) if self.kind == "lstm" else states[0]
            run: Any = SINGLE_STEPS[self.kind]
            new_states = run(x, start, *parameters.flat)
            return new_states if self.kind == "lstm" else (new_states,)
        if self.over_time is not None:
            return self.over_time(self.step, x.unsqueeze(0), tuple(states), parameters, None, backwards=False)[1]
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


class StepParameters:
    """The weights and biases of one ``TimeStep``."""

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> None:
        self.w_ih, self.w_hh, *projection = weights
        self.w_hr = projection[0] if projection else None
        self.b_ih: Tensor | None = biases[0] if biases else None
        self.b_hh: Tensor | None = biases[1] if biases else None

    @property
    def flat(self) -> list[Tensor]:
        """The tensors in the order of torch's kernels."""
        return [t for t in (self.w_ih, self.w_hh, self.b_ih, self.b_hh, self.w_hr) if t is not None]

    @property
    def of_cell(self) -> tuple[Tensor | None, ...]:
        parameters = (self.w_hh, self.b_hh)
        return parameters if self.w_hr is None else (*parameters, self.w_hr)


def _check_lengths(states: Sequence[Tensor], axis: int, length: int, reason: str) -> None:
    """As the modules of torch do: its kernels write beyond states that are too small."""
    for state in states:
        given = state.shape[axis]
        if isinstance(length, int) and isinstance(given, int) and given != length:
            raise RuntimeError(f"a state of shape {list(state.shape)} was given to a recurrent net that needs {length} "
                               f"along axis {axis}, {reason}")


def _by_step(weights: Sequence[Tensor], biases: Sequence[Tensor], weights_per_step: int) -> Iterator[StepParameters]:
    for index, start in enumerate(range(0, len(weights), weights_per_step)):
        yield StepParameters(weights[start : start + weights_per_step], biases[2 * index : 2 * index + 2])


def loop_over_time(
    step: TimeStep,
    x: Tensor,
    states: tuple[Tensor, ...],
    parameters: StepParameters,
    batch_sizes: Tensor | None,
    *,
    backwards: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Runs one ``TimeStep`` over all time steps.

    Packed sequences are sorted by length, the longest first; ``batch_sizes[t]`` of them have an element at time t.
    Forwards, a sequence that has ended keeps its state; backwards, it starts at its last element.

    Shape: x [T, N, I], states [N, …]; packed x [ΣN, I], batch_sizes [T].
    Returns: the hidden state after each time step, [T, N, P] or packed [ΣN, P], and the last states.
    Raises: RuntimeError if the states are of another number of samples.
    """
    projected = step.projection(x, parameters.w_ih, parameters.b_ih)
    slices = projected.unbind(0) if batch_sizes is None else projected.split([int(size) for size in batch_sizes])
    if slices:
        _check_lengths(states, 0, slices[0].shape[0], SAMPLES)
    outputs: list[Tensor] = []
    for current in reversed(slices) if backwards else slices:
        active = current.shape[0]
        if batch_sizes is None or active == states[0].shape[0]:
            states = step.cell(current, *states, *parameters.of_cell)
            outputs.append(states[0])
            continue
        next_states = step.cell(current, *(state[:active] for state in states), *parameters.of_cell)
        states = tuple(torch.cat([new, old[active:]]) for new, old in zip(next_states, states, strict=True))
        outputs.append(next_states[0])
    if backwards:
        outputs.reverse()
    if not outputs:
        return x.new_zeros(*x.shape[:-1], states[0].shape[-1]), states
    return (torch.stack(outputs) if batch_sizes is None else torch.cat(outputs)), states
