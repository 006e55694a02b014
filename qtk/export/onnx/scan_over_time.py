"""Runs one layer of a recurrent net as torch's ``scan``, which is translated to one ONNX Scan of any length.

The input projection of all time steps stays outside, in one GEMM; the body is the cell.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qtk.nn.recurrent import StepParameters, TimeStep


def scan_over_time(
    step: TimeStep,
    x: Tensor,
    states: tuple[Tensor, ...],
    parameters: StepParameters,
    batch_sizes: Tensor | None,
    *,
    backwards: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """``qtk.nn.recurrent.loop_over_time`` as one op, but that sequences of several lengths are padded.

    They are x [T, N, I], and ``batch_sizes`` holds their lengths [N]. The cell runs on all N sequences at every time
    step, and a sequence keeps its state beyond its length.
    """
    sequences = [x] if batch_sizes is None else [x, _has_element(x, batch_sizes)]
    if backwards:
        sequences = [each.flip(0) for each in sequences]
    sequences[0] = step.projection(sequences[0], parameters.w_ih, parameters.b_ih)
    hidden, last = _scan(step, sequences, states, parameters)
    return hidden.flip(0) if backwards else hidden, last


def _has_element(x: Tensor, lengths: Tensor) -> Tensor:
    """Says whether a sequence has an element at a time step, [T, N, 1]."""
    return (torch.arange(x.shape[0], device=x.device).unsqueeze(1) < lengths.to(x.device)).unsqueeze(-1)


def _scan(
    step: TimeStep, sequences: Sequence[Tensor], states: tuple[Tensor, ...], parameters: StepParameters
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Runs the cell over the projected input and, of several lengths, over which sequences have an element."""
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
