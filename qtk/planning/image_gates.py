"""Which products of a value with its gate, or functions of that form, work on images: where ``split_gates`` acts."""

from __future__ import annotations

from torch import Tensor, fx

from qtk.operators.lookup import row_of

GATED = ("silu", "hardswish", "gate")
"""Kinds of formulas that are a value times its gate."""


def is_image_gate(node: fx.Node) -> bool:
    """Says whether ``node`` makes a batch of images, and not of what a linear layer or a matrix product makes.

    The integer products of these can output floats, which costs no kernel and no rounding; a convolution's cannot.
    """
    value = node.meta.get("val")
    rows = [row_of(argument) for argument in node.all_input_nodes]
    linear = any(row is not None and not {"linear", "matmul"}.isdisjoint(row.names) for row in rows)
    return isinstance(value, Tensor) and value.ndim == 4 and not linear
