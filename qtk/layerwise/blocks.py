"""The blocks of a graph: stretches of it that one value enters and one value leaves, as between residual joins."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from qtk.layerwise.path_evaluator import PathEvaluator, quantizers_in
from qtk.layerwise.weighted_layers import WeightedLayer
from qtk.operators.targets import called_module
from qtk.quantizers.quantizer import Mode, Quantizer

LONG = 8
"""Weighted ops that a value outlives from which it is a skip around whole stages, or an encoder's output."""


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Blocks that are learned together: the nodes from ``begin`` to before ``end``.

    Args:
        name: of its weights.
        ends: the ends of its blocks.
        layers: whose rounding is learned.
        ranges: the quantizers whose ranges are learned.
        biases: of its layers, float; learned too.
    """

    name: str
    begin: int
    ends: tuple[int, ...]
    layers: tuple[WeightedLayer, ...]
    ranges: tuple[Quantizer, ...]
    biases: tuple[Tensor, ...] = ()

    @property
    def end(self) -> int:
        """The index after its last node."""
        return self.ends[-1]


def block_starts(nodes: Sequence[fx.Node], weighted: Collection[fx.Node], last_reads: Mapping[fx.Node, int],
                 is_parameter: Callable[[fx.Node], bool]) -> list[int]:
    """The index of the first node of every block; each has a weighted op, and a block ends as late as it can.

    A cut lies where of the values that depend on weighted ops at most one is still to be read, but for values that
    outlive ``LONG`` weighted ops: rotary tables and masks depend on none, an encoder's output lives on.

    Args:
        nodes: of the graph, in order.
        weighted: nodes that multiply with a weight to be reconstructed, or hold such.
        last_reads: value → index of the last node that reads it.
        is_parameter: whether a node is a parameter.
    """
    passed, count, begins = [0], 0, dict[fx.Node, int]()
    dependent = set[fx.Node]()
    for index, node in enumerate(nodes):
        if node in weighted or not dependent.isdisjoint(node.all_input_nodes):
            dependent.add(node)
            if last_reads[node] > index and isinstance(node.meta.get("val", Tensor()), (Tensor, tuple, list)):
                begins[node] = index
        count += node in weighted
        passed.append(count)
    crossing = [0] * (len(nodes) + 1)  # changes of the number of values that a cut before the node goes through
    for node, begin in begins.items():
        if passed[last_reads[node]] - passed[begin + 1] < LONG:
            crossing[begin + 1] += 1
            crossing[last_reads[node] + 1] -= 1
    starts, alive, cut = [0], 0, None
    for index, node in enumerate(nodes):
        alive += crossing[index]
        if alive <= 1 and not is_parameter(node) and passed[index] > passed[starts[-1]]:
            cut = index
        if node in weighted and cut is not None:
            starts.append(cut)
            cut = None
    return starts


def windows(starts: Sequence[int], length: int, end: int) -> list[list[int]]:
    """Stretches of ``length`` blocks: the index of the first node of each, then the ends of its blocks.

    >>> windows([0, 5, 9], 2, 12)
    [[0, 5, 9], [9, 12]]
    """
    cuts = [*starts, end]
    return [cuts[first:first + length + 1] for first in range(0, len(starts), length)]


def readers_of_quantizers(nodes: Sequence[fx.Node], paths: PathEvaluator) -> dict[Quantizer, list[int]]:
    """The nodes that call a quantizer, or read a parameter that it quantizes, by index."""
    readers: dict[Quantizer, list[int]] = {}
    for index, node in enumerate(nodes):
        if paths.is_parameter(node):
            continue
        module, parameters = called_module(node), map(paths.parameter, node.all_input_nodes)
        own = [] if module is None else quantizers_in(module)
        for quantizer in (*own, *(paths.quantizers[each] for each in parameters
                                  if each in paths.quantizers and paths.is_parameter(each))):
            readers.setdefault(quantizer, []).append(index)
    return readers


def find_windows(
    nodes: Sequence[fx.Node], paths: PathEvaluator, last_reads: Mapping[fx.Node, int],
    layers: Sequence[WeightedLayer], length: int, *, with_biases: bool = True,
) -> list[Window]:
    """Windows of so many blocks, over all nodes but the last, with what is used in one of them alone.

    Args:
        nodes: of the graph, in order.
        paths: evaluates them.
        last_reads: value → index of the last node that reads it.
        layers: whose rounding is to be learned.
        length: blocks of a window.
        with_biases: whether biases are to be learned.
    """
    readers = readers_of_quantizers(nodes, paths)
    layer_of = {layer.quantizer: layer for layer in layers}
    weighted = {nodes[index] for quantizer in layer_of for index in readers.get(quantizer, ())}
    starts = block_starts(nodes, weighted, last_reads, paths.is_parameter)
    found = []
    for begin, *ends in windows(starts, length, len(nodes) - 1):
        end = ends[-1]
        inside = [each for each, at in readers.items() if all(begin <= index < end for index in at)]
        own = tuple(layer_of[each] for each in inside if each in layer_of)
        ranges = tuple(each for each in inside if each.scale is not None and each.mode is Mode.SIMULATE and not (
            each.static or each.frozen or each.learns_range or each.spec.scale_format is not None))
        names = [layer.name for layer in own]
        name = f"{names[0]} … {names[-1]}" if names[1:] else names[0] if names else f"from {nodes[begin]}"
        others = {index for each in {*paths.quantizers.values()}.difference(layer.quantizer for layer in own)
                  for index in readers.get(each, ())}
        alone = set(map(id, paths.float_parameters(begin, end, others))) if with_biases else set()
        biases = {id(bias): bias for layer in own if (bias := layer.bias) is not None and id(bias) in alone}
        found.append(Window(name, begin, tuple(ends), own, ranges, tuple(biases.values())))
    return found
