"""The dynamic axes of a graph's inputs, for ``torch.export``."""

from __future__ import annotations

from torch import Tensor, fx

from qtk.capture.inputs import is_free


def free_axes(node: fx.Node) -> list[int]:
    """The axes of an input whose lengths may vary."""
    value = node.meta.get("val")
    shape = value.shape if isinstance(value, Tensor) else ()
    return [axis for axis, length in enumerate(shape) if is_free(length)]


def doubled(leaf: object, axes: list[int]) -> object:
    """A copy of an input with length 2 instead of 1 along free axes, because torch.export fixes a length of 1."""
    for axis in axes:
        if isinstance(leaf, Tensor) and leaf.shape[axis] == 1:
            leaf = leaf.repeat_interleave(2, axis)
    return leaf.clone() if isinstance(leaf, Tensor) else leaf
