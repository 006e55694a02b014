"""Writes packed sequences as padded ones with their lengths, which ONNX has operators for.

A packed value [ΣN, …] becomes a padded one [T, N, …], the time first; steps beyond a length hold anything. The cases:

1. ``pack_padded`` is replaced by its input.
2. A recurrent net reads and returns padded values; in place of the batch sizes it takes the lengths.
3. A dropout, and the marker of a quantizer whose range would not be taken over the padding, read and return padded
   values.
4. ``pad_packed_sequence`` writes its value over the steps beyond a length, and cuts the time.
5. Any other reader of a packed value gets it packed; a net or a pad that reads a packed value made by another op gets
   it padded.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from qtk.export.onnx.site_markers import is_marker
from qtk.operators.lookup import row_of
from qtk.operators.op_table import DROPOUT
from qtk.operators.targets import packed_call
from qtk.ops.pack_padded import pack_padded

Size = int | torch.SymInt
PAD = torch.ops.aten._pad_packed_sequence.default


def pad_sequences(flat: fx.GraphModule, followed: Collection[str]) -> None:
    """Rewrites every packed value of a flat graph. Changes ``flat``.

    Args:
        flat: the graph; its recurrent nets take padded values and lengths.
        followed: names of the sites whose markers are of case 3.
    """
    rewriting = _Rewriting(flat.graph, followed)
    for node in list(flat.graph.nodes):
        rewriting.visit(node)
    rewriting.pack_for_others()
    flat.graph.eliminate_dead_code()
    flat.recompile()


def hands_on(node: fx.Node, followed: Collection[str]) -> bool:
    """Says whether a node is of case 3: it keeps the elements of its input where they are."""
    return node.args[1] in followed if is_marker(node) else row_of(node) is DROPOUT


class _Rewriting:
    """The padded values and lengths found so far, each by the packed value or the batch sizes that it stands for."""

    def __init__(self, graph: fx.Graph, followed: Collection[str]) -> None:
        self.graph, self.followed = graph, followed
        self.padded: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}
        self.lengths: dict[fx.Node, fx.Node] = {}
        self.replaced: dict[fx.Node, None] = {}
        """The nodes that are no longer packed, though their readers may want that."""
        self.rewritten: set[fx.Node] = set()
        """The readers of packed values that read padded ones now."""

    def visit(self, node: fx.Node) -> None:
        if node.target is pack_padded:
            self._pack(node)
        elif hands_on(node, self.followed) and node.args[0] in self.replaced:
            self._elementwise(node)
        elif packed_call(node):
            self._net(node)
        elif node.target is PAD:
            self._pad(node)

    def _pack(self, node: fx.Node) -> None:
        """Case 1."""
        x, lengths, batch_first = node.args
        assert isinstance(x, fx.Node)
        assert isinstance(lengths, fx.Node)
        value = self._call(node, torch.ops.aten.transpose.int, x, 0, 1) if batch_first else x
        for data in elements(node, 0):
            self._stands_for(data, value, lengths)
        for sizes in elements(node, 1):
            computed = self._call(sizes, batch_sizes_of, lengths)
            sizes.replace_all_uses_with(computed)
            self.lengths[computed] = lengths

    def _net(self, node: fx.Node) -> None:
        """Case 2."""
        data, states, weights, biases, sizes = node.args
        assert isinstance(states, (list, tuple))
        assert isinstance(states[0], fx.Node)
        value, lengths = self._padded(node, data, sizes, partial(self._length, node, states[0], 1))
        node.args = (value, states, weights, biases, lengths)
        self.rewritten.add(node)
        for output in elements(node, 0):
            self._stands_for(output, output, lengths)

    def _elementwise(self, node: fx.Node) -> None:
        """Case 3."""
        value, lengths = self.padded[node.args[0]]  # type: ignore[index]
        node.args = (value, *node.args[1:])
        self.rewritten.add(node)
        self._stands_for(node, node, lengths)

    def _pad(self, node: fx.Node) -> None:
        """Case 4."""
        data, sizes, batch_first, padding_value, steps = node.args
        assert isinstance(sizes, fx.Node)
        value, lengths = self._padded(node, data, sizes, partial(self._first, node, sizes))
        result = self._call(node, padded_to, value, lengths, batch_first, padding_value, steps)
        for output in elements(node, 0):
            output.replace_all_uses_with(result)
        for output in elements(node, 1):
            output.replace_all_uses_with(lengths)
        self.rewritten |= {node, result}

    def _padded(
        self, reader: fx.Node, data: Any, sizes: Any, count: Callable[[], fx.Node]
    ) -> tuple[fx.Node, fx.Node]:
        """A packed value as padded one, and the lengths, in front of ``reader``; case 5."""
        if data not in self.padded:
            if sizes not in self.lengths:
                self.lengths[sizes] = self._call(reader, lengths_of, sizes, count())
            lengths = self.lengths[sizes]
            count_node = self._length(reader, lengths, 0)
            self.padded[data] = self._call(reader, unpacked, data, sizes, count_node), lengths
        return self.padded[data]

    def _stands_for(self, data: fx.Node, value: fx.Node, lengths: fx.Node) -> None:
        self.padded[data] = value, lengths
        self.replaced[data] = None

    def pack_for_others(self) -> None:
        """Case 5."""
        for data in self.replaced:
            others = [reader for reader in data.users if reader not in self.rewritten]
            if others:
                with self.graph.inserting_after(data):
                    packed = self.graph.call_function(repacked, self.padded[data])
                for reader in others:
                    reader.replace_input_with(data, packed)

    def _length(self, before: fx.Node, value: fx.Node, axis: int) -> fx.Node:
        return self._call(before, torch.ops.aten.sym_size.int, value, axis)

    def _first(self, before: fx.Node, sizes: fx.Node) -> fx.Node:
        """The number of sequences, as a size."""
        return self._call(before, Tensor.item, self._call(before, torch.ops.aten.select.int, sizes, 0, 0))

    def _call(self, before: fx.Node, function: Callable[..., object], *arguments: Any) -> fx.Node:
        with self.graph.inserting_before(before):
            return self.graph.call_function(function, arguments)


def elements(node: fx.Node, index: int) -> list[fx.Node]:
    return [user for user in node.users if user.target is operator.getitem and user.args[1] == index]


def batch_sizes_of(lengths: Tensor) -> Tensor:
    """Says how many sequences have an element at each time step.

    >>> batch_sizes_of(torch.tensor([3, 1])).tolist()
    [2, 1, 1]
    """
    longest: Size = lengths.max().item()  # type: ignore[assignment]  # a symbol while it is traced
    return (_steps(lengths, longest).unsqueeze(1) < lengths).sum(1)


def lengths_of(batch_sizes: Tensor, sequences: Size) -> Tensor:
    """Inverse of ``batch_sizes_of``, the longest first.

    >>> lengths_of(torch.tensor([2, 1, 1]), 2).tolist()
    [3, 1]
    """
    return _has_element(batch_sizes, sequences).sum(0)


def unpacked(data: Tensor, batch_sizes: Tensor, sequences: Size) -> Tensor:
    """[ΣN, …] → [T, N, …]; steps beyond a length hold the first element.

    >>> unpacked(torch.tensor([1, 4, 2, 3]), torch.tensor([2, 1, 1]), 2).tolist()
    [[1, 4], [2, 1], [3, 1]]
    """
    torch._check(batch_sizes.shape[0] >= 1)  # it may be a size that data decide, and a scan asks
    first = (batch_sizes.cumsum(0) - batch_sizes).unsqueeze(1)
    return data[torch.where(_has_element(batch_sizes, sequences), first + _steps(batch_sizes, sequences), 0)]


def repacked(padded: Tensor, lengths: Tensor) -> Tensor:
    """[T, N, …] → [ΣN, …].

    >>> repacked(torch.tensor([[1, 4], [2, 0], [3, 0]]), torch.tensor([3, 1])).tolist()
    [1, 4, 2, 3]
    """
    has_element = _steps(lengths, padded.shape[0]).unsqueeze(1) < lengths
    return padded.flatten(0, 1)[has_element.flatten().nonzero().squeeze(1)]


def padded_to(padded: Tensor, lengths: Tensor, batch_first: bool, padding_value: float, steps: Size) -> Tensor:
    """[T, N, …] → [steps, N, …], or [N, steps, …] if ``batch_first``, with ``padding_value`` beyond each length.

    >>> padded_to(torch.tensor([[1, 4], [2, 9], [3, 9]]), torch.tensor([3, 1]), True, 0, 4).tolist()
    [[1, 2, 3, 0], [4, 0, 0, 0]]
    """
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # loads sympy

    time = _steps(lengths, steps)
    if not statically_known_true(steps == padded.shape[0]):
        padded = padded.index_select(0, time.clamp(max=padded.shape[0] - 1))
    has_element = (time.unsqueeze(1) < lengths).reshape(time.shape[0], -1, *[1] * (padded.ndim - 2))
    result = torch.where(has_element, padded, padded.new_full((), padding_value))
    return result.transpose(0, 1) if batch_first else result


def _has_element(batch_sizes: Tensor, sequences: Size) -> Tensor:
    """Says whether a sequence has an element at a time step, [T, N]."""
    return _steps(batch_sizes, sequences) < batch_sizes.unsqueeze(1)


def _steps(like: Tensor, count: Size) -> Tensor:
    return torch.arange(count, device=like.device)
