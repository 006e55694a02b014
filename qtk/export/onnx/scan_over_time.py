"""Runs one layer of a recurrent net as torch's ``scan``, which is translated to one ONNX Scan of any length.

The input projection of all time steps stays outside, in one GEMM; the body is the cell.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qtk.nn.recurrent import Step, StepParameters


def scan_over_time(
    step: Step,
    x: Tensor,
    states: tuple[Tensor, ...],
    parameters: StepParameters,
    batch_sizes: Tensor | None,
    *,
    backwards: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """``qtk.nn.recurrent.loop_over_time`` as one op.

    Packed sequences are padded: the cell runs on all N sequences at every time step, and one that has no element there
    keeps its state.
    """
    if batch_sizes is None:
        projected = step.projection(x.flip(0) if backwards else x, parameters.w_ih, parameters.b_ih)
        hidden, last = _scan(step, [projected], states, parameters)
        return hidden.flip(0) if backwards else hidden, last
    layout = _Padding(batch_sizes, states[0].shape[0])
    padded = [layout.pad(step.projection(x, parameters.w_ih, parameters.b_ih)), layout.has_element]
    hidden, last = _scan(step, [each.flip(0) for each in padded] if backwards else padded, states, parameters)
    return layout.pack(hidden.flip(0) if backwards else hidden, x.shape[0]), last


def _scan(
    step: Step, sequences: Sequence[Tensor], states: tuple[Tensor, ...], parameters: StepParameters
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Runs the cell over the projected input and, of packed sequences, over which of them have an element."""
    given = [tensor for tensor in parameters.of_cell if tensor is not None]

    def body(*values: Tensor) -> list[Tensor]:
        old, current = values[: len(states)], values[len(states) : len(states) + len(sequences)]
        remaining = iter(values[len(states) + len(sequences) :])
        of_cell = [None if tensor is None else next(remaining) for tensor in parameters.of_cell]
        new = step.cell(current[0], *old, *of_cell)
        if len(current) > 1:
            new = [torch.where(current[1], after, before) for after, before in zip(new, old, strict=True)]
        return [*new, new[0].clone()]  # an output of the body must not be another one

    *last, hidden = torch.ops.higher_order.scan(body, list(states), list(sequences), tuple(given))
    return hidden, tuple(last)


class _Padding:
    """Where the rows of packed sequences stand in [T, N]: row ``first[t] + n`` is element t of sequence n.

    Args:
        batch_sizes: how many sequences have an element at each time step, [T].
        sequences: N.
    """

    def __init__(self, batch_sizes: Tensor, sequences: int) -> None:
        sizes = batch_sizes.unsqueeze(1)
        self.sequence = torch.arange(sequences, device=batch_sizes.device)
        self.first, self.sequences = sizes.cumsum(0) - sizes, sequences
        self.has_element = (self.sequence < sizes).unsqueeze(-1)

    def pad(self, packed: Tensor) -> Tensor:
        """[ΣN, …] → [T, N, …]; where a sequence has no element, the first row stands."""
        rows = torch.where(self.has_element.squeeze(-1), self.first + self.sequence, 0)
        return packed[rows]

    def pack(self, padded: Tensor, rows: int) -> Tensor:
        """[T, N, …] → [ΣN, …]; ``rows`` is ΣN."""
        row = torch.arange(rows, device=padded.device)
        time = (self.first <= row).sum(0) - 1
        return padded[time, row - self.first.squeeze(1)[time]]
