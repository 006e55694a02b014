"""Functions for the op table that relate axes: the channel axes of a weight, an axis before and after data movement."""

from __future__ import annotations

import torch
from torch import fx

from qtk.torch_private import length_hint

# WeightAxes: the output-channel and the input-channel axis of a weight; ``op_row.out_in`` is the usual one.


def in_out(op: fx.Node, weight: fx.Node) -> tuple[int, int] | None:
    """``[in, out, …]``."""
    return 1, 0


def stacked_in_out(op: fx.Node, weight: fx.Node) -> tuple[int, int] | None:
    """``[…, in, out]``."""
    rank = weight.meta["val"].ndim
    return rank - 1, rank - 2


def one_per_channel(op: fx.Node, weight: fx.Node) -> tuple[int, int] | None:
    """A vector with one number per channel: its only axis is both."""
    return (0, 0) if weight.meta["val"].ndim == 1 else None


def factor(op: fx.Node, weight: fx.Node) -> tuple[int, int] | None:
    """A right factor is ``[…, in, out]``, a left one ``[…, out, in]``; a vector has no output channel."""
    rank = weight.meta["val"].ndim
    if rank < 2:
        return None
    *_, left, right = (arg for arg in op.args if isinstance(arg, fx.Node))
    return (rank - 2, rank - 1) if weight is left and weight is not right else (rank - 1, rank - 2)


def einsum_operand(op: fx.Node, weight: fx.Node) -> tuple[int, int] | None:
    """Out: the first index of the weight that the output keeps and no other operand has; in: the first it sums."""
    equation, operands = op.args[0], op.args[1]
    assert isinstance(equation, str)
    assert isinstance(operands, (list, tuple))
    terms, arrow, output = equation.replace(" ", "").partition("->")
    if not arrow or "." in equation:
        return None
    pairs = zip(terms.split(","), operands, strict=True)
    (indices, _), *others = sorted(pairs, key=lambda pair: pair[1] is not weight)
    kept = [axis for axis, index in enumerate(indices) if index in output and not any(index in o for o, _ in others)]
    summed = [axis for axis, index in enumerate(indices) if index not in output]
    return (kept[0], summed[0]) if kept and summed else None


# InputAxis: an axis of a moved value, in the source it was moved from.


def same_axis(moved: fx.Node, source: fx.Node, axis: int) -> int | None:
    """Axes keep their order."""
    return axis


def permuted_axis(moved: fx.Node, source: fx.Node, axis: int) -> int | None:
    """The axis before a permutation, found by running the op on a tensor whose axes have different lengths."""
    lengths = torch.empty(tuple(range(2, 2 + source.meta["val"].ndim)), device="meta")
    permuted = moved.target(lengths, *moved.args[1:], **moved.kwargs)  # type: ignore[operator]
    return int(permuted.shape[axis]) - 2


def same_axis_of_equal_rank(moved: fx.Node, source: fx.Node, axis: int) -> int | None:
    """Axes keep their order unless one is dropped (select, unbind)."""
    return axis if source.meta["val"].ndim == moved.meta["val"].ndim else None


def unexpanded_axis(moved: fx.Node, source: fx.Node, axis: int) -> int | None:
    """Axes keep their order, new ones come first; a repeated axis has none in the source."""
    old, new = source.meta["val"].shape, moved.meta["val"].shape
    before = axis - (len(new) - len(old))
    return before if before >= 0 and length_hint(old[before]) == length_hint(new[axis]) else None


def selected_axis(moved: fx.Node, source: fx.Node, axis: int) -> int | None:
    """The axes that ``index_select``, or ``index`` with one tensor of indices, leaves whole; axes around it stay."""
    rank = source.meta["val"].ndim
    if len(moved.args) < 2:
        return None
    if isinstance(moved.args[1], int):  # index_select
        at, new = moved.args[1] % rank, 1
    else:
        assert isinstance(moved.args[1], (list, tuple))
        tensors = {place: index for place, index in enumerate(moved.args[1]) if isinstance(index, fx.Node)}
        if len(tensors) != 1:
            return None
        ((at, index),) = tensors.items()
        if index.meta["val"].dtype in (torch.bool, torch.uint8):
            return None
        new = index.meta["val"].ndim
    return axis if axis < at else axis - new + 1 if axis >= at + new else None


def reshaped_axis(moved: fx.Node, source: fx.Node, axis: int) -> int | None:
    """See ``axis_before_reshape``."""
    old, new = ([length_hint(length) for length in node.meta["val"].shape] for node in (source, moved))
    return axis_before_reshape(old, new, axis)


def axis_before_reshape(old: list[int], new: list[int], axis: int) -> int | None:
    """The axis of ``old`` with the same length and as many elements before it; ``None`` if there is none.

    >>> axis_before_reshape([6, 3, 3], [6, 9], 0), axis_before_reshape([6, 3, 3], [18, 3], 0)
    (0, None)
    """
    elements_before = 1
    for length in new[:axis]:
        elements_before *= length
    passed = 1
    for index, length in enumerate(old):
        if passed == elements_before and length == new[axis] and (length > 1 or index == axis):
            return index
        passed *= length
    return None
