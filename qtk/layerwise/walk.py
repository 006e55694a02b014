"""One walk through a model for methods that improve one layer after the other.

All batches go through the graph together, on two paths: the float model's and the quantized model's. At each layer the
walk yields the statistics of its input, and continues with the updated weight. So the cost is two forward passes,
however many layers there are, and only values that are still to be read are kept.

A module that runs as a whole (a loop over time, a model's own Python) is run once more before the walk continues, to
collect the inputs of the layers inside, which are yielded one after the other (``qtk.layerwise.nested_layers``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
from torch import Tensor, fx

from qtk.capture.calls import Call, leaves_text
from qtk.capture.inputs import input_leaves
from qtk.errors import CalibrationError, QtkError
from qtk.graph.captured_graph import CapturedGraph
from qtk.graph.failed_op import failed_op
from qtk.graph.graphs import nested_graphs
from qtk.graph.op_table import row_of
from qtk.graph.targets import called_module
from qtk.layerwise.live_values import LiveValues, Offload, Values
from qtk.layerwise.nested_layers import NestedLayers
from qtk.layerwise.path_evaluator import PathEvaluator
from qtk.layerwise.second_moments import RequiredStatistics, SecondMoments
from qtk.layerwise.weighted_layers import WeightedLayer
from qtk.numerics.im2col import Geometry, weight_to_gemm
from qtk.public import NOT_OURS, raised_by_us

Inputs: TypeAlias = Literal["asym", "symfp", "symqt"]
"""Which inputs the output error of a layer is measured on: the float model's for the float weight and the quantized
model's for the quantized weight (asym); for both weights the float model's (symfp) or the quantized model's (symqt)."""

QUANTIZED_PATHS: dict[Inputs, tuple[bool, ...]] = {"asym": (False, True), "symfp": (False,), "symqt": (True,)}
"""For every path of the walk, whether quantizers act on it."""


@dataclass(slots=True)
class OutputPower:
    """Sums of the squares of a layer's float output and of its error; 0 before the walk has passed the layer."""

    signal: float = 0.0
    noise: float = 0.0

    def add(self, float_output: Tensor, simulated: Tensor) -> None:
        reference = float_output.to(torch.float32).flatten()
        error = reference - simulated.flatten()
        self.signal += float(reference @ reference)
        self.noise += float(error @ error)


@dataclass(frozen=True, slots=True, eq=False)
class LayerInput:
    """The input of a layer that all batches have reached.

    Args:
        layer: the layer.
        moments: statistics of its input; ``None`` if none were required, or no data reached it.
        output: power of its output; stays 0 where it is not measured: with one path, and in nested layers.
    """

    layer: WeightedLayer
    moments: SecondMoments | None
    output: OutputPower = field(default_factory=OutputPower)


def walk(
    model: torch.nn.Module,
    calls: Sequence[Call],
    required: Mapping[WeightedLayer, RequiredStatistics | None],
    *,
    inputs: Inputs = "asym",
    offload: Offload = "none",
) -> Iterator[LayerInput]:
    """Yields every layer of ``required`` at its last use; update its weight and bias before the next iteration.

    Quantizers act in their modes, except on the float path, where they are bypassed.

    Args:
        model: a prepared model with quantizers, in eval mode.
        calls: its calls, one for each batch.
        required: the layers, with the statistics to collect; ``None`` for one that needs none.
        inputs: see ``Inputs``.
        offload: where values are stored between layers.

    Raises: CalibrationError if an input holds NaN or ±inf.
    """
    quantized = QUANTIZED_PATHS[inputs]
    if isinstance(model, CapturedGraph) and not model.variants:
        yield from _GraphWalk(model, calls, required, quantized, offload)
        return
    nested = NestedLayers(model, required, quantized=quantized[0])
    with nested.listening():
        for batch, call in enumerate(calls):
            with _naming(batch, call):
                nested.observe(lambda call=call: model(*call.args, **call.kwargs))  # type: ignore[misc]
    for layer in required:
        yield LayerInput(layer, nested.moments.get(layer))


@dataclass(frozen=True, slots=True)
class _Input:
    """A value that several layers may read with the same geometry; they share its statistics."""

    value: fx.Node
    geometry: Geometry
    required: RequiredStatistics


class _GraphWalk:
    """The walk through one captured graph."""

    def __init__(
        self,
        graph: CapturedGraph,
        calls: Sequence[Call],
        required: Mapping[WeightedLayer, RequiredStatistics | None],
        quantized: tuple[bool, ...],
        offload: Offload,
    ) -> None:
        self._graph = graph.graph
        self._calls = calls
        self._required = required
        self._paths = PathEvaluator(graph, quantized)
        self._live = LiveValues(offload)
        self._nodes: list[fx.Node] = list(graph.graph.nodes)
        self._index = {node: index for index, node in enumerate(self._nodes)}
        self._freed_after = self._last_uses()
        self._uses = self._users_of_layers()
        self._nested: dict[fx.Node, NestedLayers] = {}
        self._inputs: dict[fx.Node, list[_Input]] = {}  # by the first node that reads them
        self._readers: Counter[_Input] = Counter()
        self._moments: dict[_Input, SecondMoments] = {}
        self._outputs: dict[fx.Node, OutputPower] = {}
        for layer, users in self._uses.items():
            for node in users:
                if nested_graphs(node):
                    module = called_module(node)
                    assert module is not None
                    self._nested.setdefault(node, NestedLayers(module, required, quantized=quantized[0]))
                elif (layer_input := self._input(layer, node)) is not None:
                    self._readers[layer_input] += 1
        for layer_input in self._readers:
            reads = [n for layer, users in self._uses.items() for n in users if self._input(layer, n) == layer_input]
            self._inputs.setdefault(min(reads, key=self._index.__getitem__), []).append(layer_input)

    def __iter__(self) -> Iterator[LayerInput]:
        stops: dict[fx.Node, list[WeightedLayer]] = {}
        for layer, users in self._uses.items():
            stops.setdefault(users[-1], []).append(layer)
        begin = 0
        try:
            for stop in sorted(stops, key=self._index.__getitem__):
                for batch, call in enumerate(self._calls):
                    with _naming(batch, call):
                        self._advance(batch, begin, self._index[stop])
                begin = self._index[stop]
                self._paths.drop_float(begin)
                for layer in stops[stop]:
                    self._paths.keep_float((layer.weight, layer.bias))
                    layer_input = LayerInput(layer, self._collected(layer))
                    self._outputs[stop] = layer_input.output
                    yield layer_input
            if stops and len(self._paths.quantized) > 1:
                for batch, call in enumerate(self._calls):
                    with _naming(batch, call):
                        self._advance(batch, begin, begin + 1)
        finally:
            self._live.close()

    @torch.no_grad()
    def _advance(self, batch: int, begin: int, end: int) -> None:
        """Runs the nodes from ``begin`` on up to ``end``, and observes what ``end`` is about to read."""
        values = self._live.take(batch) if begin else self._start(self._calls[batch])
        for node in self._nodes[begin:end]:
            if node is not self._nodes[begin]:
                self._observe(node, values)
            self._run(node, values)
            for freed in self._freed_after.get(node, ()):
                values.pop(freed, None)
        self._observe(self._nodes[end], values)
        self._live.put(batch, values)

    def _start(self, call: Call) -> Values:
        leaves = input_leaves(self._graph, call.args, call.kwargs)
        placeholders = self._graph.find_nodes(op="placeholder")
        paths = len(self._paths.quantized)
        return {node: (leaf,) * paths for node, leaf in zip(placeholders, leaves, strict=True)}

    def _run(self, node: fx.Node, values: Values) -> None:
        self._paths.run(node, values)
        if node in self._outputs and node not in self._nested and len(self._paths.quantized) > 1:
            self._outputs[node].add(*values[node])

    def _observe(self, node: fx.Node, values: Values) -> None:
        """Adds to the statistics of the inputs that ``node`` reads first, and of the layers nested in it."""
        for layer_input in self._inputs.get(node, ()):
            moments = self._moments.get(layer_input)
            if moments is None:
                moments = self._moments[layer_input] = SecondMoments(
                    layer_input.geometry, layer_input.required, weight=self._only_weight(layer_input)
                )
            first, last = (self._paths.value(layer_input.value, values, path) for path in (0, -1))
            try:
                moments.observe(last, None if first is last else first)
            except CalibrationError as error:
                raise CalibrationError(f"{self._reader_of(layer_input).name}: {error}") from None
        if node in self._nested:
            with self._nested[node].listening():
                self._nested[node].observe(lambda: self._paths.evaluate(node, values, 0))

    def _collected(self, layer: WeightedLayer) -> SecondMoments | None:
        """The summed statistics of all uses of a layer; those that no other layer needs are dropped."""
        uses: list[SecondMoments] = []
        for node in self._uses[layer]:
            if node in self._nested:
                nested = self._nested[node].moments.pop(layer, None)
                uses += [] if nested is None else [nested]
            elif (layer_input := self._input(layer, node)) is not None:
                self._readers[layer_input] -= 1
                is_shared = bool(self._readers[layer_input])
                uses.append(self._moments[layer_input] if is_shared else self._moments.pop(layer_input))
        if len(uses) < 2:
            return uses[0] if uses else None
        total = SecondMoments(uses[0].geometry, uses[0].required)  # other layers may share those of the uses
        for use in uses:
            total.merge(use)
        return total

    def _input(self, layer: WeightedLayer, node: fx.Node) -> _Input | None:
        required, row = self._required[layer], row_of(node)
        if required is None or row is None or row.data_arg is None:
            return None
        value = node.args[row.data_arg]
        assert isinstance(value, fx.Node)
        return _Input(value, layer.geometry, required)

    def _only_weight(self, layer_input: _Input) -> Tensor | None:
        """The only weight that an input is multiplied with, if there is only one and it has few outputs."""
        if self._readers[layer_input] > 1 or layer_input.required.block is not None:
            return None
        layer = self._reader_of(layer_input)
        if len(self._uses[layer]) > 1:
            return None
        weight = weight_to_gemm(layer.weight.detach(), layer.geometry)
        return weight if 2 * weight.shape[1] <= weight.shape[2] else None

    def _reader_of(self, layer_input: _Input) -> WeightedLayer:
        """The first layer that reads an input."""
        return next(
            layer for layer, users in self._uses.items() for n in users if self._input(layer, n) == layer_input
        )

    def _users_of_layers(self) -> dict[WeightedLayer, list[fx.Node]]:
        """The nodes that read the weight of each layer, in order."""
        layers, quantizers = {layer.name: layer for layer in self._required}, self._paths.quantizers
        uses: dict[WeightedLayer, list[fx.Node]] = {}
        for node in self._nodes:
            for read in node.all_input_nodes:
                layer = layers.get(quantizers[read].site) if read in quantizers else None
                if layer is not None and self._paths.is_parameter(read):
                    uses.setdefault(layer, []).append(node)
        return uses

    def _last_uses(self) -> dict[fx.Node, list[fx.Node]]:
        """Node → the values that no node reads after it."""
        last = {read: node for node in self._nodes for read in (node, *node.all_input_nodes)}
        freed_after: dict[fx.Node, list[fx.Node]] = {}
        for read, node in last.items():
            freed_after.setdefault(node, []).append(read)
        return freed_after


@contextmanager
def _naming(batch: int, call: Call) -> Iterator[None]:
    """Names the batch in the errors of the body. Raises: CalibrationError for those of torch."""
    try:
        yield
    except QtkError as error:
        raise type(error)(f"batch {batch}: {error}") from None
    except NOT_OURS:
        raise
    except Exception as error:  # whatever a model raises
        if raised_by_us(error):
            raise
        inputs, op = leaves_text((call.args, call.kwargs)), failed_op(error)
        where = f" at {op}" if op else ""
        message = f"batch {batch} ({inputs}) does not run{where}: {type(error).__name__}: {error}"
        raise CalibrationError(message) from error
