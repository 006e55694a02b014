"""The operator ``pack_padded``: ``torch.ops.aten._pack_padded_sequence`` that can be traced, with the check it lacks.

How many elements and time steps there are, the lengths decide; a tracer gives both sizes symbols of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qtk.ops.registration import Gradient, register


def _pack(x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    steps = x.shape[1 if batch_first else 0]
    if lengths.numel() and int(lengths.max()) > steps:
        raise ValueError(f"a sequence to pack has a length of {int(lengths.max())}, the padded input has {steps} time "
                         "steps; pass lengths of at most that")
    packed: tuple[Tensor, Tensor] = torch.ops.aten._pack_padded_sequence(x, lengths, batch_first)
    return packed


def _shapes(x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    context = torch.library.get_ctx()
    elements, steps = context.new_dynamic_size(), context.new_dynamic_size()
    sequences, longest = x.shape[:2] if batch_first else x.shape[:2][::-1]
    torch._check(lengths.shape[0] == sequences)
    torch._check(steps <= longest)
    return x.new_empty(elements, *x.shape[2:]), lengths.new_empty(steps)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, bool], output: tuple[Tensor, Tensor]) -> None:
    ctx.shape, ctx.batch_first = inputs[0].shape, inputs[2]
    ctx.save_for_backward(output[1])


def _backward(ctx: Any, grad: Tensor, _: object) -> tuple[Tensor, None, None]:
    (batch_sizes,) = ctx.saved_tensors
    return torch.ops.aten._pack_padded_sequence_backward(grad, ctx.shape, batch_sizes, ctx.batch_first), None, None


pack_padded = register(
    "pack_padded(Tensor x, Tensor lengths, bool batch_first) -> (Tensor, Tensor)", _pack, _shapes,
    gradient=Gradient(_save, _backward),
)
"""The elements of padded sequences, time step by time step, and how many sequences have one at each.

>>> data, batch_sizes = pack_padded(torch.tensor([[1, 2, 3], [4, 0, 0]]), torch.tensor([3, 1]), True)
>>> data.tolist(), batch_sizes.tolist()
([1, 4, 2, 3], [2, 1, 1])

Shape: x [T, N, …], or [N, T, …] if ``batch_first``; lengths [N], the longest first, on the CPU. Results: [ΣN, …] and
[max(lengths)].

Raises: ValueError if a length exceeds T: torch (2.14) then returns too few elements, and its recurrent kernels read
    beyond them; RuntimeError as torch for lengths in another order, or below 1.
"""
