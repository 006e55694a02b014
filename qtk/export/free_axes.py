"""The dynamic axes of a graph's inputs, for ``torch.export``."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from qtk.calls.inputs import is_free
from qtk.calls.served_sizes import SIZES, Axis, ServedSizes
from qtk.capture.prepared_model import PreparedGraph
from qtk.nn.scan import Scan
from qtk.operators.targets import called_module

LOOP = ("torch.export writes a loop over it out, as quantized recurrent nets have; leave them in float inside, by the "
        "rule {match: {op: [lstm, gru, rnn]}, inside: float}, or export formats=('onnx',)")
SCAN = ("a scan over it is the model's own Python, of which a file has the ops of one length; pad or cut inputs to it, "
        "or export once for each length, from a simulation whose example inputs have it")
"""Why a file fixes an axis."""


def free_axes(node: fx.Node) -> list[int]:
    """The axes of an input whose lengths may vary."""
    value = node.meta.get("val")
    shape = value.shape if isinstance(value, Tensor) else ()
    return [axis for axis, length in enumerate(shape) if is_free(length)]


def file_axes(node: fx.Node) -> list[int]:
    """The axes of an input whose lengths may vary in a file: no scan reads values that long, other than in number."""
    scanned = {
        str(size) for scan in _scans(node.graph) for read in scan.all_input_nodes
        for size in (read.meta["val"].shape[1:] if isinstance(read.meta["val"], Tensor) else [read.meta["val"]])
    }
    return [axis for axis in free_axes(node) if str(node.meta["val"].shape[axis]) not in scanned]


def warn_of_fixed_axes(graph: fx.Graph, program: ExportedProgram) -> None:
    """Names the axes of the inputs that are free in ``graph``, and of one length in its program."""
    placeholders = zip(program.graph.find_nodes(op="placeholder"), program.graph_signature.input_specs, strict=True)
    inputs = [node for node, spec in placeholders if spec.kind is InputKind.USER_INPUT]
    for before, after in zip(graph.find_nodes(op="placeholder"), inputs, strict=False):  # buffers may follow
        for axis in sorted({*free_axes(before)} - {*free_axes(after)}):
            length, why = after.meta["val"].shape[axis], SCAN if _scans(graph) else LOOP
            warnings.warn(f"the file runs at length {length} of axis {axis} of {before.target} alone, which is "
                          f"declared free: {why}", stacklevel=2)


def warn_of_written_values(model: fx.GraphModule) -> None:
    """Names the inputs whose values are written into the graph: a file has no check of them."""
    sizes = model.meta.get(SIZES, ServedSizes())
    if sizes.values:
        warnings.warn(f"{sizes.written}; the file computes the same whatever these inputs are, so give it no others",
                      stacklevel=2)


def _scans(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.find_nodes(op="call_module") if isinstance(called_module(node), Scan)]


def doubled(leaf: object, axes: list[int]) -> object:
    """A copy of an input with length 2 instead of 1 along free axes, because torch.export fixes a length of 1."""
    for axis in axes:
        if isinstance(leaf, Tensor) and leaf.shape[axis] == 1:
            leaf = leaf.repeat_interleave(2, axis)
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


@dataclass(frozen=True, slots=True)
class EqualAxes:
    """Axes of inputs that have one length, and its name; ``None``: no name was given."""

    axes: frozenset[Axis]
    name: str | None = None


def equal_axes(model: fx.GraphModule) -> tuple[EqualAxes, ...]:
    """The free axes of the inputs of a prepared graph in order, axes of one length together.

    They have it by the code of the model (one symbol), by the ops that fail otherwise (``ties``), or by a given name.
    """
    symbol: dict[Axis, str] = {
        (str(node.target), axis): str(node.meta["val"].shape[axis])
        for node in model.graph.find_nodes(op="placeholder") for axis in free_axes(node)
    }
    sizes = model.sizes if isinstance(model, PreparedGraph) else None
    name = {axis: given for axis, given in ({} if sizes is None else sizes.names).items() if axis in symbol}
    links = [[axis for axis in symbol if symbol[axis] == each] for each in dict.fromkeys(symbol.values())]
    links += [[axis for axis in name if name[axis] == each] for each in dict.fromkeys(name.values())]
    links += [[axis for axis in tied if axis in symbol] for tied in ([] if sizes is None else sizes.ties)]
    groups: list[set[Axis]] = []
    for link in links:
        joined = set(link).union(*(group for group in groups if not group.isdisjoint(link)))
        groups = [group for group in groups if group.isdisjoint(link)] + [joined]
    order = [*symbol]
    groups.sort(key=lambda group: min(order.index(axis) for axis in group))
    return tuple(EqualAxes(frozenset(group), next((given for axis, given in name.items() if axis in group), None))
                 for group in groups if group)
