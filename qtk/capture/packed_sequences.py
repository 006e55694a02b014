"""Captures packed sequences: pack, recurrent net and pad become ops of one graph.

torch cannot trace them. ``nn.LSTM`` and its kin read the number of sequences out of ``batch_sizes``, a tensor, and
``torch.ops.aten._pad_packed_sequence`` takes no symbolic length. While ``packing_as_ops`` is active, the nets take the
number of sequences from the shape of the lengths, and pack and pad call marker ops, which ``recover`` replaces by
torch's own. The number of packed elements and of time steps are sizes that the lengths decide.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from qtk.torch_private import rnn_kernels

Size = int | torch.SymInt

torch.library.define("qtk::captured_pack", "(Tensor x, Tensor lengths, bool batch_first) -> (Tensor, Tensor)")
torch.library.define(
    "qtk::captured_pad",
    "(Tensor data, Tensor batch_sizes, bool batch_first, Scalar padding_value, SymInt steps, SymInt sequences) "
    "-> (Tensor, Tensor)",
)
PACK, PAD = torch.ops.qtk.captured_pack.default, torch.ops.qtk.captured_pad.default


@torch.library.impl("qtk::captured_pack", "CompositeExplicitAutograd")
def _pack(x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    packed: tuple[Tensor, Tensor] = torch.ops.aten._pack_padded_sequence(x, lengths, batch_first)
    return packed


@torch.library.register_fake("qtk::captured_pack")  # type: ignore[untyped-decorator]
def _shapes_of_pack(x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    context = torch.library.get_ctx()
    elements, steps = context.new_dynamic_size(), context.new_dynamic_size()
    sequences, longest = x.shape[:2] if batch_first else x.shape[:2][::-1]
    torch._check(lengths.shape[0] == sequences)
    torch._check(steps <= longest)
    return x.new_empty(elements, *x.shape[2:]), lengths.new_empty(steps)


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
    known: dict[int, tuple[Tensor, Size]] = {}

    def count(batch_sizes: Tensor) -> Size:
        """The number of sequences: known of those packed here, else the first of the batch sizes."""
        if id(batch_sizes) in known:
            return known[id(batch_sizes)][1]
        sequences: Size = batch_sizes[0].item()  # type: ignore[assignment]
        torch._check(sequences >= 1)
        return sequences

    def pack(x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
        data, batch_sizes = PACK(x, lengths, batch_first)
        known[id(batch_sizes)] = batch_sizes, lengths.shape[0]
        return data, batch_sizes

    def pad(
        data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, steps: Size
    ) -> tuple[Tensor, Tensor]:
        padded: tuple[Tensor, Tensor] = PAD(data, batch_sizes, batch_first, padding_value, steps, count(batch_sizes))
        return padded

    with contextlib.ExitStack() as stack:
        for name, function in (("_pack_padded_sequence", pack), ("_pad_packed_sequence", pad)):
            setattr(rnn_kernels, name, function)  # hides that of torch, which the module reads from elsewhere
            stack.callback(delattr, rnn_kernels, name)
        for kind in (nn.RNN, nn.GRU, nn.LSTM):
            forward = kind.forward
            stack.callback(setattr, kind, "forward", forward)
            setattr(kind, "forward", _on_packed(forward, count))
        yield


def _on_packed(forward: Callable[..., Any], count: Callable[[Tensor], Size]) -> Callable[..., Any]:
    """``forward`` of a recurrent net, whose packed sequences have ``count(batch_sizes)`` sequences."""

    @functools.wraps(forward)
    def call(net: nn.RNNBase, input: Tensor | PackedSequence, hx: Any = None) -> Any:
        if not isinstance(input, PackedSequence):
            return forward(net, input, hx)
        data, batch_sizes, order, back = input
        states = net.permute_hidden(hx, order) if hx is not None else _zeros(net, data, count(batch_sizes))
        settings = net.bias, net.num_layers, net.dropout, net.training, net.bidirectional
        run = getattr(rnn_kernels, net.mode.lower())
        output, *last = run(data, batch_sizes, states, net._flat_weights, *settings)
        hidden = tuple(last) if net.mode == "LSTM" else last[0]
        return PackedSequence(output, batch_sizes, order, back), net.permute_hidden(hidden, back)

    return call


def _zeros(net: nn.RNNBase, data: Tensor, sequences: Size) -> Tensor | tuple[Tensor, Tensor]:
    steps = net.num_layers * (2 if net.bidirectional else 1)
    hidden = data.new_zeros(steps, sequences, net.proj_size or net.hidden_size)
    return (hidden, data.new_zeros(steps, sequences, net.hidden_size)) if net.mode == "LSTM" else hidden
