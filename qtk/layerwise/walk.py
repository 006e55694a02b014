"""One walk through a model for methods that improve one layer after the other.

All batches go through the graph together, on two paths: that of the float model and that of the quantized one. Where
they reach a layer, the moments of its input are handed out; the walk goes on with what has become of its weight. So the
cost is two forward passes, however many layers there are, and only values still to be read are held.

A module that runs as it pleases (a loop over time, a model's own Python) is run once more, before the walk goes on
behind it, to see what reaches the layers inside; these are handed out together (``qtk.layerwise.inside``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, fx, nn

from qtk.capture.calls import Call
from qtk.capture.inputs import input_leaves
from qtk.errors import CalibrationError
from qtk.graph.captured_graph import CapturedGraph
from qtk.graph.graphs import nested_graphs
from qtk.graph.insert import quantizer_called
from qtk.graph.op_table import row_of
from qtk.layerwise.inside import Inside, quantizers_in
from qtk.layerwise.live_values import LiveValues, Offload, Values
from qtk.layerwise.second_moments import SecondMoments, Wanted
from qtk.layerwise.weighted_layers import WeightedLayer
from qtk.numerics.im2col import Geometry, matrix_of
from qtk.quantizers.modes import in_mode
from qtk.quantizers.quantizer import Mode
from qtk.torch_private import pytree

Inputs: TypeAlias = Literal["asym", "symfp", "symqt"]
"""Which inputs a layer is judged by: those of the float model for its float weight and those of the quantized one for
its quantized weight (asym); or for both weights those of the float (symfp), of the quantized model (symqt)."""

QUANTIZED: dict[Inputs, tuple[bool, ...]] = {"asym": (False, True), "symfp": (False,), "symqt": (True,)}
"""For every path that is walked, whether its quantizers act."""


@dataclass(slots=True)
class Outputs:
    """Squares of the float output and of the difference from it, summed; 0 before the walk has passed the layer."""

    signal: float = 0.0
    noise: float = 0.0

    def add(self, original: Tensor, simulated: Tensor) -> None:
        reference = original.to(torch.float32).flatten()
        apart = reference - simulated.flatten()
        self.signal += float(reference @ reference)
        self.noise += float(apart @ apart)


@dataclass(frozen=True, slots=True, eq=False)
class LayerInput:
    """A layer that all batches have reached.

    Args:
        layer: which.
        moments: of its input; ``None`` if none were wanted, or no data came there.
        outputs: of its op; they stay 0 where they are not seen: on one path, and inside of modules.
    """

    layer: WeightedLayer
    moments: SecondMoments | None
    outputs: Outputs = field(default_factory=Outputs)


def walk(
    model: nn.Module,
    calls: Sequence[Call],
    wanted: Mapping[WeightedLayer, Wanted | None],
    *,
    inputs: Inputs = "asym",
    offload: Offload = "none",
) -> Iterator[LayerInput]:
    """Every layer of ``wanted`` once, at its last use; change its weight and bias before asking for the next.

    Quantizers act as their modes say, but for those on the float path.

    Args:
        model: a prepared model with quantizers, in eval mode.
        calls: how it is called; one for each batch.
        wanted: the layers, with what is to be known; ``None`` for one whose weight is known already.
        inputs: see ``Inputs``.
        offload: where values wait.

    Raises: CalibrationError if an input holds NaN or ±inf.
    """
    if isinstance(model, CapturedGraph) and not model.variants:
        yield from _GraphWalk(model, calls, wanted, QUANTIZED[inputs], offload)
        return
    inside = Inside(model, wanted, quantized=QUANTIZED[inputs][0])
    with inside.watching():
        for call in calls:
            inside.observe(lambda call=call: model(*call.args, **call.kwargs))  # type: ignore[misc]
    for layer in wanted:
        yield LayerInput(layer, inside.moments.get(layer))


@dataclass(frozen=True, slots=True)
class _Input:
    """A value that some layers meet in the same way; they share its moments."""

    value: fx.Node
    geometry: Geometry
    wanted: Wanted


class _GraphWalk:
    """The walk through one captured graph."""

    def __init__(
        self,
        graph: CapturedGraph,
        calls: Sequence[Call],
        wanted: Mapping[WeightedLayer, Wanted | None],
        quantized: tuple[bool, ...],
        offload: Offload,
    ) -> None:
        self._graph = graph
        self._calls = calls
        self._wanted = wanted
        self._paths = quantized
        self._live = LiveValues(offload)
        self._nodes: list[fx.Node] = list(graph.graph.nodes)
        self._place = {node: index for index, node in enumerate(self._nodes)}
        self._quantizers = {node: called for node in self._nodes if (called := quantizer_called(node)) is not None}
        self._parting = {
            node for node in self._nodes if node.op == "call_module" and quantizers_in(self._module(node))
        }
        self._dies = self._last_reads()
        self._parameters = self._last_reads_of_parameters()
        self._originals: dict[str, Tensor] = {}
        self._uses = self._users_of_layers()
        self._inside: dict[fx.Node, Inside] = {}
        self._inputs: dict[fx.Node, list[_Input]] = {}  # by the first node that reads them
        self._readers: Counter[_Input] = Counter()
        self._moments: dict[_Input, SecondMoments] = {}
        self._outputs: dict[fx.Node, Outputs] = {}
        for layer, users in self._uses.items():
            for node in users:
                if nested_graphs(node):
                    self._inside.setdefault(node, Inside(self._module(node), wanted, quantized=quantized[0]))
                elif (needed := self._input(layer, node)) is not None:
                    self._readers[needed] += 1
        for needed in self._readers:
            reads = [n for layer, users in self._uses.items() for n in users if self._input(layer, n) == needed]
            self._inputs.setdefault(min(reads, key=self._place.__getitem__), []).append(needed)

    def __iter__(self) -> Iterator[LayerInput]:
        stops: dict[fx.Node, list[WeightedLayer]] = {}
        for layer, users in self._uses.items():
            stops.setdefault(users[-1], []).append(layer)
        begin = 0
        try:
            for stop in sorted(stops, key=self._place.__getitem__):
                for batch in range(len(self._calls)):
                    self._advance(batch, begin, self._place[stop])
                begin = self._place[stop]
                self._forget_originals(begin)
                for layer in stops[stop]:
                    self._keep_originals(layer)
                    reached = LayerInput(layer, self._gathered(layer))
                    self._outputs[stop] = reached.outputs
                    yield reached
            if stops and len(self._paths) > 1:
                for batch in range(len(self._calls)):
                    self._advance(batch, begin, begin + 1)
        finally:
            self._live.close()

    @torch.no_grad()
    def _advance(self, batch: int, begin: int, end: int) -> None:
        """Runs the nodes from ``begin`` on up to ``end``, and looks at what ``end`` is about to read."""
        values = self._live.take(batch) if begin else self._start(self._calls[batch])
        for node in self._nodes[begin:end]:
            if node is not self._nodes[begin]:
                self._observe(node, values)
            self._run(node, values)
            for dead in self._dies.get(node, ()):
                values.pop(dead, None)
        self._observe(self._nodes[end], values)
        self._live.put(batch, values)

    def _start(self, call: Call) -> Values:
        leaves = input_leaves(self._graph.graph, call.args, call.kwargs)
        if leaves is None:
            leaves = pytree.tree_leaves((call.args, call.kwargs))
        placeholders = self._graph.graph.find_nodes(op="placeholder")
        return {node: (leaf,) * len(self._paths) for node, leaf in zip(placeholders, leaves, strict=True)}

    def _run(self, node: fx.Node, values: Values) -> None:
        if node.op in ("placeholder", "output") or self._is_read_anew(node):
            return
        calls = self._on_paths(node, values)
        result = calls[0]()
        together = node not in self._parting and self._agree(node, values)
        values[node] = (result,) * len(calls) if together else (result, *(call() for call in calls[1:]))
        if node in self._outputs and node not in self._inside and len(calls) > 1:
            self._outputs[node].add(*values[node])

    def _on_paths(self, node: fx.Node, values: Values) -> list[Callable[[], Any]]:
        """What runs ``node`` on each path."""
        return [lambda path=path: self._result(node, values, path) for path in range(len(self._paths))]  # type: ignore[misc]

    def _result(self, node: fx.Node, values: Values, path: int) -> Any:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda read: self._value(read, values, path))
        if node.op == "call_function":
            assert callable(node.target)
            return node.target(*args, **kwargs)
        if self._paths[path]:
            return self._module(node)(*args, **kwargs)
        if node in self._quantizers:
            return args[0]
        with in_mode(quantizers_in(self._module(node)) if node in self._parting else (), Mode.BYPASS):
            return self._module(node)(*args, **kwargs)

    def _value(self, node: fx.Node, values: Values, path: int) -> Any:
        if node.op == "get_attr":
            original = None if self._paths[path] else self._originals.get(str(node.target))
            return self._attribute(node) if original is None else original
        if self._is_read_anew(node):
            source = self._value(node.all_input_nodes[0], values, path)
            return self._quantizers[node](source) if self._paths[path] else source
        return values[node][path]

    def _is_read_anew(self, node: fx.Node) -> bool:
        """Whether a value is made at each use: parameters, bare or quantized, which may have changed in between."""
        if node in self._quantizers:
            return self._is_read_anew(node.all_input_nodes[0])
        return node.op == "get_attr"

    def _agree(self, node: fx.Node, values: Values) -> bool:
        """Whether a node reads the same objects on all paths."""
        for read in node.all_input_nodes:
            if self._is_read_anew(read):
                if read in self._quantizers or str(read.target) in self._originals:
                    return False
            elif any(other is not values[read][0] for other in values[read]):
                return False
        return True

    def _observe(self, node: fx.Node, values: Values) -> None:
        for needed in self._inputs.get(node, ()):
            moments = self._moments.get(needed)
            if moments is None:
                moments = self._moments[needed] = SecondMoments(
                    needed.geometry, needed.wanted, weight=self._only_weight(needed)
                )
            original, *_, x = (self._value(needed.value, values, path) for path in (0, *range(len(self._paths))))
            try:
                moments.observe(x, None if original is x else original)
            except CalibrationError as error:
                raise CalibrationError(f"{self._reader_of(needed).name}: {error}") from None
        if node in self._inside:
            with self._inside[node].watching():
                self._inside[node].observe(self._on_paths(node, values)[0])

    def _gathered(self, layer: WeightedLayer) -> SecondMoments | None:
        """The moments of all uses of a layer, which are dropped once nobody else waits for them."""
        found: list[SecondMoments] = []
        for node in self._uses[layer]:
            if node in self._inside:
                seen = self._inside[node].moments.pop(layer, None)
                found += [] if seen is None else [seen]
            elif (needed := self._input(layer, node)) is not None:
                self._readers[needed] -= 1
                found.append(self._moments[needed] if self._readers[needed] else self._moments.pop(needed))
        if len(found) < 2:
            return found[0] if found else None
        total = SecondMoments(found[0].geometry, found[0].wanted)  # others may share those that were found
        for seen in found:
            total.merge(seen)
        return total

    def _input(self, layer: WeightedLayer, node: fx.Node) -> _Input | None:
        wanted, row = self._wanted[layer], row_of(node)
        if wanted is None or row is None or row.data_arg is None:
            return None
        value = node.args[row.data_arg]
        assert isinstance(value, fx.Node)
        return _Input(value, layer.geometry, wanted)

    def _only_weight(self, needed: _Input) -> Tensor | None:
        """The weight that an input meets, if it is one, meets no other and has few outputs."""
        if self._readers[needed] > 1 or needed.wanted.block is not None:
            return None
        layer = self._reader_of(needed)
        if len(self._uses[layer]) > 1:
            return None
        weight = matrix_of(layer.weight.detach(), layer.geometry)
        return weight if 2 * weight.shape[1] <= weight.shape[2] else None

    def _reader_of(self, needed: _Input) -> WeightedLayer:
        """The first layer that meets an input."""
        return next(own for own, users in self._uses.items() for n in users if self._input(own, n) == needed)

    def _users_of_layers(self) -> dict[WeightedLayer, list[fx.Node]]:
        """The nodes that read the weight of each layer, in order."""
        layers = {layer.name: layer for layer in self._wanted}
        uses: dict[WeightedLayer, list[fx.Node]] = {}
        for node in self._nodes:
            for read in node.all_input_nodes:
                layer = layers.get(self._quantizers[read].site) if read in self._quantizers else None
                if layer is not None and self._is_read_anew(read):
                    uses.setdefault(layer, []).append(node)
        return uses

    def _last_reads(self) -> dict[fx.Node, list[fx.Node]]:
        """Node → the values that nobody reads after it."""
        last = {read: node for node in self._nodes for read in (node, *node.all_input_nodes)}
        dies: dict[fx.Node, list[fx.Node]] = {}
        for read, node in last.items():
            dies.setdefault(node, []).append(read)
        return dies

    def _keep_originals(self, layer: WeightedLayer) -> None:
        """Copies what the float path is still to read of a layer about to change."""
        for name, (tensor, _) in self._parameters.items():
            if False in self._paths and (tensor is layer.weight or tensor is layer.bias):
                self._originals[name] = tensor.detach().clone()

    def _forget_originals(self, begin: int) -> None:
        """Drops what no node from ``begin`` on reads."""
        self._originals = {
            name: kept for name, kept in self._originals.items() if self._parameters[name][1] >= begin
        }

    def _last_reads_of_parameters(self) -> dict[str, tuple[Tensor, int]]:
        """Name of a parameter → itself, and the place of the last node that reads it, quantized or bare."""
        found: dict[str, tuple[Tensor, int]] = {}
        for node in self._nodes:
            for read in node.all_input_nodes:
                while read in self._quantizers and self._is_read_anew(read):
                    read = read.all_input_nodes[0]
                if read.op == "get_attr":
                    found[str(read.target)] = self._attribute(read), self._place[node]
        return found

    def _attribute(self, node: fx.Node) -> Tensor:
        owner, _, leaf = str(node.target).rpartition(".")
        value: Tensor = getattr(self._graph.get_submodule(owner), leaf)
        return value

    def _module(self, node: fx.Node) -> nn.Module:
        return self._graph.get_submodule(str(node.target))
