"""What tracers need at recurrent nets: shapes without a loop over time, and packed sequences as ops of one graph.

Torch (2.14, 2.15) finds the shapes by its own loop over time, which fixes the number of time steps and takes as long
as there are time steps: ``lengths_stay_free``. It cannot trace packed sequences. ``nn.LSTM`` and its kin read the
number of sequences out of ``batch_sizes``, a tensor, and ``torch.ops.aten._pad_packed_sequence`` takes no symbolic
length. While ``packing_as_ops`` is active, the nets take the number of sequences from the shape of the lengths,
packing calls ``pack_padded``, and padding a marker op that ``recover`` replaces by torch's.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from qtk.calls.calls import Call
from qtk.ops.pack_padded import pack_padded
from qtk.torch_private import OpOverload, python_kernel, rnn_kernels, rnn_parameter_names

Size = int | torch.SymInt

torch.library.define(
    "qtk::captured_pad",
    "(Tensor data, Tensor batch_sizes, bool batch_first, Scalar padding_value, SymInt steps, SymInt sequences) "
    "-> (Tensor, Tensor)",
)
PAD = torch.ops.qtk.captured_pad.default


@torch.library.impl("qtk::captured_pad", "CompositeExplicitAutograd")
def _pad(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, steps: int, sequences: int
) -> tuple[Tensor, Tensor]:
    padded: tuple[Tensor, Tensor] = torch.ops.aten._pad_packed_sequence(
        data, batch_sizes, batch_first, padding_value, steps
    )
    return padded


@torch.library.register_fake("qtk::captured_pad")  # type: ignore[untyped-decorator]
def _shapes_of_pad(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, steps: Size, sequences: Size
) -> tuple[Tensor, Tensor]:
    first = (sequences, steps) if batch_first else (steps, sequences)
    return data.new_empty(*first, *data.shape[1:]), batch_sizes.new_empty(sequences)


@contextlib.contextmanager
def packing_as_ops() -> Iterator[None]:
    """While active, ``pack_padded_sequence``, ``pad_packed_sequence`` and nets on packed sequences can be traced."""
    known: dict[int, tuple[Tensor, Tensor]] = {}
    """The batch sizes made here and their lengths, by the identity of the first."""

    def count(batch_sizes: Tensor) -> Size:
        if id(batch_sizes) in known:
            return known[id(batch_sizes)][1].shape[0]
        sequences: Size = batch_sizes[0].item()  # type: ignore[assignment]
        torch._check(sequences >= 1)
        return sequences

    def pack(x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
        data, batch_sizes = pack_padded(x, lengths, batch_first)
        known[id(batch_sizes)] = batch_sizes, lengths
        return data, batch_sizes

    def pad(
        data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, steps: Size
    ) -> tuple[Tensor, Tensor]:
        padded, lengths = PAD(data, batch_sizes, batch_first, padding_value, steps, count(batch_sizes))
        return padded, known[id(batch_sizes)][1] if id(batch_sizes) in known else lengths

    def on_packed(net: nn.RNNBase, packed: PackedSequence, hx: Any) -> Any:
        data, batch_sizes, order, back = packed
        sequences = count(batch_sizes)
        if hx is not None:
            _check_states(net, hx, sequences)
        zeros = zero_states(net, data, sequences)
        start: Any = zeros if net.mode == "LSTM" else zeros[0]
        states = start if hx is None else net.permute_hidden(hx, order)
        settings = net.bias, net.num_layers, net.dropout, net.training, net.bidirectional
        parameters = [net.get_parameter(name) for names in rnn_parameter_names(net) for name in names]
        run = getattr(rnn_kernels, net.mode.lower())
        output, *last = run(data, batch_sizes, states, parameters, *settings)
        hidden: Any = tuple(last) if net.mode == "LSTM" else last[0]
        return PackedSequence(output, batch_sizes, order, back), net.permute_hidden(hidden, back)

    kernels = _kernels(_pack_padded_sequence=pack, _pad_packed_sequence=pad)
    with _lengths_counted(), _nets(lambda _: on_packed), kernels:
        yield


@contextlib.contextmanager
def packing_checked() -> Iterator[None]:
    """While active, packed sequences and states of other sizes than they say are an error, as in a captured graph.

    torch (2.14) checks neither, and reads beyond their ends.
    """

    def checked(forward: Callable[..., Any]) -> Callable[..., Any]:
        def on_packed(net: nn.RNNBase, packed: PackedSequence, hx: Any) -> Any:
            torch._check(int(packed.batch_sizes.sum()) == packed.data.shape[0])
            if hx is not None:
                _check_states(net, hx, int(packed.batch_sizes[0]))
            return forward(net, packed, hx)

        return on_packed

    with _lengths_counted(), _nets(checked), _kernels(_pack_padded_sequence=pack_padded):
        yield


@contextlib.contextmanager
def _lengths_counted() -> Iterator[None]:
    """While active, ``pack_padded_sequence`` takes a length for each sequence; torch's drops sequences without one.

    The code of the function is exchanged, for a user's file has imported the function itself.
    """
    function, code = pack_padded_sequence, pack_padded_sequence.__code__
    original = types.FunctionType(code, function.__globals__)

    def checked(
        input: Tensor, lengths: Tensor | Sequence[int], batch_first: bool, enforce_sorted: bool
    ) -> PackedSequence:
        count = lengths.shape[0] if isinstance(lengths, Tensor) else len(lengths)
        torch._check(input.shape[0 if batch_first else 1] == count)
        packed: PackedSequence = original(input, lengths, batch_first, enforce_sorted)
        return packed

    function.__globals__["_qtk_checked"] = checked
    function.__code__ = _call_checked.__code__
    try:
        yield
    finally:
        function.__code__ = code
        del function.__globals__["_qtk_checked"]


def _call_checked(
    input: Tensor, lengths: Tensor | Sequence[int], batch_first: bool = False, enforce_sorted: bool = True
) -> PackedSequence:
    """``pack_padded_sequence`` while its code is exchanged; it reads the globals of torch's file."""
    packed: PackedSequence = globals()["_qtk_checked"](input, lengths, batch_first, enforce_sorted)
    return packed


@contextlib.contextmanager
def _kernels(**functions: Callable[..., object]) -> Iterator[None]:
    """Hides kernels of torch, which ``rnn_kernels`` looks up elsewhere, behind ``functions``."""
    vars(rnn_kernels).update(functions)
    try:
        yield
    finally:
        for name in functions:
            del vars(rnn_kernels)[name]


@contextlib.contextmanager
def _nets(on_packed: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """While active, recurrent nets compute packed sequences by ``on_packed`` of their own ``forward``."""

    def replaced(forward: Callable[..., Any]) -> Callable[..., Any]:
        inner = on_packed(forward)

        @functools.wraps(forward)
        def call(net: nn.RNNBase, input: Tensor | PackedSequence, hx: Any = None) -> Any:
            return inner(net, input, hx) if isinstance(input, PackedSequence) else forward(net, input, hx)

        return call

    with contextlib.ExitStack() as stack:
        for kind in (nn.RNN, nn.GRU, nn.LSTM):
            stack.callback(setattr, kind, "forward", kind.forward)
            kind.forward = replaced(kind.forward)  # type: ignore[method-assign]
        yield


def _check_states(net: nn.RNNBase, hx: Tensor | tuple[Tensor, Tensor], sequences: Size) -> None:
    """Raises: RuntimeError if a state has another shape than the net takes for so many sequences."""
    states = (hx,) if isinstance(hx, Tensor) else hx
    for state, width in zip(states, _widths(net), strict=True):
        torch._check(state.ndim == 3)
        for length, expected in zip(state.shape, (_steps(net), sequences, width), strict=True):
            torch._check(length == expected)


def takes_packed(module: nn.Module, call: Call) -> bool:
    """Says whether ``module`` is a recurrent net and ``call`` passes it a packed sequence."""
    arguments = (*call.args, *call.kwargs.values())
    return isinstance(module, nn.RNNBase) and any(isinstance(each, PackedSequence) for each in arguments)


def zero_states(net: nn.RNNBase, data: Tensor, sequences: Size) -> tuple[Tensor, ...]:
    """The first states of a net that is given none: of all layers, each [layers · directions, N, width]."""
    return tuple(torch.zeros(_steps(net), sequences, width, dtype=data.dtype, device=data.device)
                 for width in _widths(net))


def _steps(net: nn.RNNBase) -> int:
    return net.num_layers * (2 if net.bidirectional else 1)


def _widths(net: nn.RNNBase) -> list[int]:
    """The widths of the hidden state and, of an LSTM, the cell state."""
    return [net.proj_size or net.hidden_size, *([net.hidden_size] if net.mode == "LSTM" else [])]


_ATEN = torch.ops.aten
_OPS = (_ATEN.lstm.input, _ATEN.gru.input, _ATEN.rnn_tanh.input, _ATEN.rnn_relu.input)
_OF_PACKED = (_ATEN.lstm.data, _ATEN.gru.data, _ATEN.rnn_tanh.data, _ATEN.rnn_relu.data)


@contextlib.contextmanager
def lengths_stay_free(ops: Collection[OpOverload] = (*_OPS, *_OF_PACKED)) -> Iterator[None]:
    """While active, tracers find the shapes of recurrent nets without a loop over time.

    Args:
        ops: the ops that the tracer does not decompose; decomposed, they would be constants.
    """
    importlib.import_module("torch._decomp")  # registers the kernels that are replaced
    with contextlib.ExitStack() as stack:
        for op in ops:
            stack.enter_context(python_kernel(op, _results_of_packed if op in _OF_PACKED else _results))
        yield


def _results(
    x: Tensor, hx: Tensor | Sequence[Tensor], params: Sequence[Tensor], *settings: object
) -> tuple[Tensor, ...]:
    """Tensors like the outputs of a recurrent net, strides included; ``settings`` as in the operator's schema."""
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
