"""The shapes of recurrent nets while a tracer runs.

Torch (2.14, 2.15) finds them by its own loop over time, which fixes the number of time steps and takes as long as
there are time steps.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from qtk.torch_private import OpOverload, python_kernel

_ATEN = torch.ops.aten
_OPS = (_ATEN.lstm.input, _ATEN.gru.input, _ATEN.rnn_tanh.input, _ATEN.rnn_relu.input)
_OF_PACKED = (_ATEN.lstm.data, _ATEN.gru.data, _ATEN.rnn_tanh.data, _ATEN.rnn_relu.data)


@contextlib.contextmanager
def lengths_stay_free(ops: Collection[OpOverload] = (*_OPS, *_OF_PACKED)) -> Iterator[None]:
    """While active, tracers find the shapes of recurrent nets without a loop over time.

    Args:
        ops: those that the tracer does not decompose; decomposed, they would be constants.
    """
    importlib.import_module("torch._decomp")  # registers the kernels that are replaced
    with contextlib.ExitStack() as stack:
        for op in ops:
            stack.enter_context(python_kernel(op, _results_of_packed if op in _OF_PACKED else _results))
        yield


def _results(
    x: Tensor, hx: Tensor | Sequence[Tensor], params: Sequence[Tensor], *settings: object
) -> tuple[Tensor, ...]:
    """Tensors like those that a recurrent net returns, strides included; ``settings`` as in the operator's schema."""
    *_, bidirectional, batch_first = settings
    states = [hx] if isinstance(hx, Tensor) else list(hx)
    time_first = x.transpose(0, 1) if batch_first else x
    width = states[0].shape[-1] * (2 if bidirectional else 1)
    output = x.new_zeros(time_first.shape[0], time_first.shape[1], width)
    return (output.transpose(0, 1) if batch_first else output, *(state.new_zeros(state.shape) for state in states))


def _results_of_packed(
    data: Tensor, batch_sizes: Tensor, hx: Tensor | Sequence[Tensor], params: Sequence[Tensor], *settings: object
) -> tuple[Tensor, ...]:
    """As ``_results``, of a packed sequence. Shape: data [ΣN, I]."""
    output, *states = _results(data.unsqueeze(0), hx, params, *settings, False)
    return (output.squeeze(0), *states)
