"""Into how many equal parts the products with a weight cut its outputs: queries, keys and values in one parameter."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import fx

from qtk.graph.evaluate import evaluate
from qtk.graph.flow import Flow
from qtk.graph.sites import Port
from qtk.moments.stack_use import NotALayer
from qtk.operators.op_row import OpRow
from qtk.torch_private import length_hint

MOST_PARTS = 16
"""Parts of a weight, each of which has a Gram matrix of its own."""

Use = tuple[Flow, OpRow, Port]
"""A product that reads a weight: flow of its graph, row of the op, where it reads the weight."""


def output_parts(uses: Iterable[Use]) -> int:
    """The least number of equal parts that a weight has, so that each use reads whole parts; 1 where all read it whole.

    Raises: NotALayer if there would be more than ``MOST_PARTS``.
    """
    outputs, edges = 0, set[int]()
    for flow, row, port in uses:
        root = flow.root(port.value)
        axis = None if port.value is root else _output_axis(flow, row, port)
        if axis is not None:
            outputs = length_hint(root.meta["val"].shape[axis])
            edges |= _edges(root, port.value, axis)
    length = math.gcd(outputs, *edges)
    if length and outputs // length > MOST_PARTS:
        raise NotALayer(f"is cut along its {outputs} outputs into parts that no {MOST_PARTS} equal ones make up")
    return outputs // length if length else 1


def _output_axis(flow: Flow, row: OpRow, port: Port) -> int | None:
    """The axis of the weight, as it is stored, that counts outputs; ``None`` where it cannot be told."""
    axes = row.weight_axes(port.user, port.value) if row.weight_axes is not None else None
    return None if axes is None else flow.axis_at_root(port.value, axes[0])


def _edges(root: fx.Node, moved: fx.Node, axis: int) -> set[int]:
    """Where runs of outputs that a use reads begin and end; none if data decide which it reads."""
    lengths = [length_hint(length) for length in root.meta["val"].shape]
    index = torch.arange(lengths[axis]).reshape([-1 if each == axis else 1 for each in range(len(lengths))])
    if not _depends_on(moved, root):
        return set()
    read = evaluate(moved, {root: index.expand(lengths)}).unique()
    if len(read) == lengths[axis]:
        return set()
    starts = read[torch.cat([torch.ones(1, dtype=torch.bool), read.diff() != 1])]
    ends = read[torch.cat([read.diff() != 1, torch.ones(1, dtype=torch.bool)])] + 1
    return {*starts.tolist(), *ends.tolist()}


def _depends_on(node: fx.Node, root: fx.Node) -> bool:
    """Says whether a moved value depends on ``root`` alone."""
    return node is root or (node.op != "placeholder" and bool(node.all_input_nodes) and all(
        _depends_on(read, root) for read in node.all_input_nodes))
