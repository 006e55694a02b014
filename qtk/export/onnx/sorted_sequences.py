"""Leaves out the sorting by length that packing asks for and padded sequences do without.

``pack_padded_sequence(…, enforce_sorted=False)`` sorts the lengths, puts the sequences and first states in this order,
and padding and last states are put back. A sort whose order nothing else reads is dropped with all of that.
"""

from __future__ import annotations

import operator
from collections.abc import Collection

import torch
from torch import Tensor, fx

from qtk.export.onnx.padded_sequences import PAD, elements, hands_on
from qtk.operators.lookup import row_of
from qtk.operators.op_row import Role
from qtk.operators.targets import BATCH_SIZES, packed_call
from qtk.ops.pack_padded import pack_padded

_ATEN = torch.ops.aten
_MOVES = (_ATEN.to.dtype_layout, _ATEN.to.dtype, _ATEN.to.device)
"""To another device, which files know nothing of, or another dtype."""


def drop_sorting(graph: fx.Graph, followed: Collection[str]) -> None:
    """Drops every such sort of a flat graph with packed values. Changes ``graph``.

    Args:
        graph: the graph, before its packed values are padded.
        followed: as in ``pad_sequences``.
    """
    for node in list(graph.nodes):
        if node.target in _MOVES and isinstance(source := node.args[0], fx.Node) and _dtype(node) == _dtype(source):
            node.replace_all_uses_with(source)
            graph.erase_node(node)
    for node in list(graph.nodes):
        if node.target is _ATEN.sort.default and node.args[2:] == (True,):
            _Sort(node, followed).drop()
    graph.eliminate_dead_code()


def _dtype(node: fx.Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, Tensor) else None


class _Sort:
    """A descending sort of lengths: its values, its order, and the inverses of that."""

    def __init__(self, node: fx.Node, followed: Collection[str]) -> None:
        self.lengths, self.followed = node.args[0], followed
        self.sorted, self.order = set(elements(node, 0)), set(elements(node, 1))
        self.back = {user for order in self.order for user in order.users
                     if user.target is _ATEN.scatter.src and user.args[2] is order}

    def drop(self) -> None:
        """Replaces what is sorted by what was sorted, if that is all that the order is for."""
        selections = {user for order in self.order | self.back for user in order.users
                      if user not in self.back and user.target is not _ATEN.empty_like.default}  # for the scatter
        readers = {user for lengths in self.sorted for user in lengths.users}
        unsorted = {user for user in selections if self._gives_lengths(user)}
        moved, readers = selections - unsorted, readers - unsorted
        packed = [user for user in readers if user.target is pack_padded]
        if (all(map(self._is_for_packing, moved)) and all(map(self._reads_lengths, readers))
                and all(map(self._becomes_padded, packed))):
            for node in moved:
                node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
            for node in self.sorted | unsorted:
                node.replace_all_uses_with(self.lengths)  # type: ignore[arg-type]

    def _gives_lengths(self, node: fx.Node) -> bool:
        source, *at = node.all_input_nodes
        return node.target is _ATEN.index.Tensor and source in self.sorted and len(at) == 1 and at[0] in self.back

    def _reads_lengths(self, node: fx.Node) -> bool:
        return node.target is _ATEN.sym_size.int or (node.target is pack_padded and node.args[1] in self.sorted)

    def _becomes_padded(self, packing: fx.Node) -> bool:
        """Says whether no reader wants the elements packed, in an order that follows from the sequences."""
        pending = elements(packing, 0)
        while pending:
            for user in pending.pop().users:
                if hands_on(user, self.followed):
                    pending.append(user)
                elif not self._is_packed_here(user) or not self._is_put_back(user):
                    return False
                elif packed_call(user):
                    pending += elements(user, 0)
        sizes = [user for value in elements(packing, 1) for user in value.users]
        return all(user.target is _ATEN.sym_size.int or self._is_packed_here(user) for user in sizes)

    def _is_put_back(self, node: fx.Node) -> bool:
        """Says whether the sequences of a net or a padding are in the order of the lengths before and behind it.

        First states of a net are created or put in the order of the sort, and all but packed results are put back.
        """
        if packed_call(node) and not all(map(self._is_sorted, node.args[1])):  # type: ignore[arg-type]
            return False
        pending = [each for each in node.users if not (packed_call(node) and each.args[1] == 0)]
        while pending:
            for user in pending.pop().users:
                if hands_on(user, self.followed):
                    pending.append(user)
                elif user.target is not _ATEN.index_select.default or user.args[2] not in self.back:
                    return False
        return True

    def _is_sorted(self, state: fx.node.Argument) -> bool:
        while isinstance(state, fx.Node) and hands_on(state, self.followed):
            state = state.args[0]
        if not isinstance(state, fx.Node):
            return False
        row = row_of(state)
        return (row is not None and row.role is Role.CREATE) or (
            state.target is _ATEN.index_select.default and state.args[2] in self.order)

    def _is_for_packing(self, node: fx.Node) -> bool:
        if node.target is not _ATEN.index_select.default:
            return False
        if node.args[2] in self.back:
            source = node.args[0]
            while isinstance(source, fx.Node) and (
                source.target is operator.getitem or hands_on(source, self.followed)
            ):
                source = source.args[0]
            return isinstance(source, fx.Node) and self._is_packed_here(source)
        pending, readers = [node], set[fx.Node]()
        while pending:
            for user in pending.pop().users:
                (pending.append if hands_on(user, self.followed) else readers.add)(user)
        return all(self._reads_lengths(each) or self._is_packed_here(each) for each in readers)

    def _is_packed_here(self, node: fx.Node) -> bool:
        """Says whether a net or a padding is called with the batch sizes of these lengths."""
        sizes = node.args[BATCH_SIZES] if packed_call(node) else node.args[1] if node.target is PAD else None
        packing = sizes.args[0] if isinstance(sizes, fx.Node) and sizes.target is operator.getitem else None
        return isinstance(packing, fx.Node) and packing.target is pack_padded and packing.args[1] in self.sorted
