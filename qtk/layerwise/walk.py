"""One walk through a model for methods that improve one layer after the other.

All batches go through the graph together, on two paths: the float model's and the quantized model's. At each layer the
walk yields the statistics of its input, and continues with the updated weight. So the cost is two forward passes,
however many layers there are, and only values that are still to be read are kept.

A module that runs as a whole (a loop over time, a model's own Python) is run once more before the walk continues, to
collect the inputs of the layers inside, which are yielded one after the other (``qtk.layerwise.nested_layers``).
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, fx

from qtk.calls.calls import Call
from qtk.calls.token_inputs import Unmasked
from qtk.capture.prepared_model import PreparedGraph
from qtk.errors import CalibrationError
from qtk.graph.captured_graph import CapturedGraph
from qtk.graph.graphs import nested_graphs
from qtk.layerwise.all_experts import Router, routers
from qtk.layerwise.layer_input import LayerInput
from qtk.layerwise.live_values import LiveValues, Offload, Values, start_values
from qtk.layerwise.named_batch import named_batch
from qtk.layerwise.nested_layers import NestedLayers
from qtk.layerwise.path_evaluator import PathEvaluator
from qtk.layerwise.weighted_layers import WeightedLayer
from qtk.moments.batch_rows import BatchRows, samples_of
from qtk.moments.holdout import Holdout
from qtk.moments.matrix_rows import MatrixRows
from qtk.moments.required_statistics import RequiredStatistics
from qtk.moments.second_moments import SecondMoments, takes_less_with_weight
from qtk.moments.stack_use import StackUse
from qtk.numerics.im2col import Geometry, weight_to_gemm
from qtk.operators.lookup import row_of
from qtk.operators.targets import called_module

Inputs: TypeAlias = Literal["asym", "symfp", "symqt"]
"""Which inputs the output error of a layer is measured on: the float model's for the float weight and the quantized
model's for the quantized weight (asym); for both weights the float model's (symfp) or the quantized model's (symqt)."""

QUANTIZED_PATHS: dict[Inputs, tuple[bool, ...]] = {"asym": (False, True), "symfp": (False,), "symqt": (True,)}
"""For every path of the walk, whether quantizers act on it."""


def walk(
    model: torch.nn.Module,
    calls: Sequence[Call],
    required: Mapping[WeightedLayer, RequiredStatistics | None],
    *,
    inputs: Inputs = "asym",
    offload: Offload = "none",
    holdout: Holdout | None = None,
    all_experts: bool = False,
) -> Iterator[LayerInput]:
    """Yields every layer of ``required`` when all of its input is known; update layers that ``waits`` ends together.

    Quantizers act in their modes, except on the float path, where they are bypassed.

    Args:
        model: a prepared model with quantizers, in eval mode.
        calls: its calls, one for each batch.
        required: the layers, with the statistics to collect; ``None`` for one that needs none.
        inputs: see ``Inputs``.
        offload: where values are stored between layers.
        holdout: the samples whose output is measured apart, too.
        all_experts: whether the statistics of experts are of all tokens (``qtk.layerwise.all_experts``).

    Raises: CalibrationError if an input holds NaN or ±inf, or for ``all_experts`` without a router in one graph.
    """
    quantized = QUANTIZED_PATHS[inputs]
    if (graph := only_graph(model, calls)) is not None:
        yield from _GraphWalk(graph, calls, required, quantized, offload, holdout, all_experts)
        return
    if all_experts:
        raise CalibrationError("calibrate_all_experts: the model runs as Python around its graphs (prepared.report has "
                               "the reason), which decides itself what each expert gets; leave it out")
    if any(call.valid is not None for call in calls):
        _warn_of_unfollowed([layer.name for layer in required])
    if inputs == "asym" and len(required) > 1:
        warnings.warn(
            "the model runs as Python around its graphs, so that the errors of all layers are measured on the float "
            "model's inputs, and what earlier layers' rounding does to these is not corrected. Where another call "
            "makes one graph (prepared.report has the reason; of transformers use_cache=False in the inputs), make the "
            "simulation with that call; inputs=\"symfp\" says that this is meant", stacklevel=3,
        )
    nested = NestedLayers(model, required, quantized=quantized[0])
    with nested.listening():
        for batch, call in enumerate(calls):
            with named_batch(batch, call):
                run = lambda call=call: model(*call.args, **call.kwargs)  # noqa: E731
                nested.observe(run, batch, samples_of(call))
    for layer in required:
        yield LayerInput(layer, nested.moments.get(layer), waits=False)


def only_graph(model: torch.nn.Module, calls: Sequence[Call]) -> CapturedGraph | None:
    """The captured graph that serves all calls; ``None`` for a model of islands, and for calls of several kinds."""
    if not isinstance(model, CapturedGraph):
        return None
    if not isinstance(model, PreparedGraph):
        return model
    served = {model.variant(call.args, call.kwargs) for call in calls}
    return served.pop() if len(served) == 1 else None


@dataclass(frozen=True, slots=True)
class _Input:
    """A value that several layers may read with the same geometry; they share its statistics.

    Layers with stacks of matrices do not share them: ``use`` finds the rows of each matrix of one layer.
    """

    value: fx.Node
    geometry: Geometry
    required: RequiredStatistics
    use: StackUse | None = None

    @property
    def is_pointwise(self) -> bool:
        """Says whether tokens that do not count can be left out."""
        return self.geometry.is_pointwise and (self.use is None or not self.use.is_routed)


class _GraphWalk:
    """The walk through one captured graph."""

    def __init__(
        self,
        graph: CapturedGraph,
        calls: Sequence[Call],
        required: Mapping[WeightedLayer, RequiredStatistics | None],
        quantized: tuple[bool, ...],
        offload: Offload,
        holdout: Holdout | None,
        all_experts: bool,
    ) -> None:
        self._module, self._graph = graph, graph.graph
        self._holdout = holdout
        self._calls = calls
        self._rows = BatchRows(graph, calls, holdout)
        self._required = required
        moved = {move for layer in required for move in layer.moves}
        self._paths = PathEvaluator(graph, quantized, moved)
        self._live = LiveValues(offload)
        self._nodes: list[fx.Node] = list(graph.graph.nodes)
        self._index = {node: index for index, node in enumerate(self._nodes)}
        self._uses = self._users_of_layers()
        self._nested: dict[fx.Node, NestedLayers] = {}
        self._inputs: dict[fx.Node, list[_Input]] = {}  # by the first node that reads them
        self._readers: Counter[_Input] = Counter()
        self._moments: dict[_Input, SecondMoments] = {}
        self._outputs: dict[fx.Node, LayerInput] = {}
        for layer, users in self._uses.items():
            for node in users:
                if nested_graphs(node):
                    module = called_module(node)
                    assert module is not None
                    self._nested.setdefault(node, NestedLayers(module, required, quantized=quantized[0]))
                elif (layer_input := self._input(layer, node)) is not None:
                    self._readers[layer_input] += 1
        self._warn_of_unfollowed()
        for layer_input in self._readers:
            reads = [n for layer, users in self._uses.items() for n in users if self._input(layer, n) == layer_input]
            self._inputs.setdefault(min(reads, key=self._index.__getitem__), []).append(layer_input)
        self._routers: dict[_Input, Router] = routers(
            self._graph, {each: (each.value, each.use) for each in self._readers}) if all_experts else {}
        self._freed_after = self._last_uses()

    def __iter__(self) -> Iterator[LayerInput]:
        stops: dict[fx.Node, list[WeightedLayer]] = {}
        for layer in self._uses:
            stops.setdefault(self._stop(layer), []).append(layer)
        begin = 0
        try:
            for stop in sorted(stops, key=self._index.__getitem__):
                for batch, call in enumerate(self._calls):
                    with named_batch(batch, call):
                        self._advance(batch, begin, self._index[stop])
                begin = self._index[stop]
                self._paths.drop_float(begin)
                for layer in stops[stop]:
                    self._paths.keep_float((layer.parameter, layer.bias))
                    users = self._uses[layer]
                    output = LayerInput(layer, None, waits=layer is stops[stop][-1] and True in self._paths.quantized)
                    if not any(self._input(layer, node) in self._routers for node in users):  # else of other rows
                        self._outputs[users[-1]] = output
                    yield replace(output, moments=self._collected(layer))  # which nothing here holds meanwhile
            if stops and len(self._paths.quantized) > 1:
                for batch, call in enumerate(self._calls):
                    with named_batch(batch, call):
                        self._advance(batch, begin, 1 + max(self._index[users[-1]] for users in self._uses.values()))
            _warn_of_all_rows("in some batches the lengths do not fit", self._readers_of(self._rows.misfits))
        finally:
            self._live.close()

    @torch.no_grad()
    def _advance(self, batch: int, begin: int, end: int) -> None:
        """Runs the nodes from ``begin`` on up to ``end``, and observes what ``end`` is about to read."""
        paths, call = len(self._paths.quantized), self._calls[batch]
        values = self._live.take(batch) if begin else start_values(self._module, call, paths)
        for node in self._nodes[begin:end]:
            if node is not self._nodes[begin]:
                self._observe(node, values, batch)
            self._run(node, values, batch)
            for freed in self._freed_after.get(node, ()):
                values.pop(freed, None)
        self._observe(self._nodes[end], values, batch)
        self._live.put(batch, values)

    def _run(self, node: fx.Node, values: Values, batch: int) -> None:
        self._paths.run(node, values)
        if node in self._outputs and node not in self._nested and len(self._paths.quantized) > 1:
            geometry, (first, last) = self._outputs[node].layer.geometry, (values[node][0], values[node][-1])
            if first.shape != last.shape:
                return
            select = self._rows.rows if geometry.is_pointwise else (lambda node, value, batch: value)
            self._outputs[node].output.add(select(node, first, batch), select(node, last, batch))
            if self._holdout is not None and first.ndim > 1 and geometry.axes is None:
                held_out = (self._rows.split(node, value, batch, geometry)[1] for value in (first, last))
                self._outputs[node].held_out_output.add(*held_out)

    def _observe(self, node: fx.Node, values: Values, batch: int) -> None:
        """Adds to the statistics of the inputs that ``node`` reads first, and of the layers nested in it."""
        for layer_input in self._inputs.get(node, ()):
            moments = self._moments.get(layer_input)
            if moments is None:
                moments = self._moments[layer_input] = SecondMoments(
                    layer_input.geometry, layer_input.required, weight=self._only_weight(layer_input)
                )
            router = self._routers.get(layer_input)
            for chosen in (values,) if router is None else router.choices(self._paths, values):
                self._add_rows(layer_input, moments, chosen, batch)
        if node in self._nested:
            with self._nested[node].listening():
                self._nested[node].observe(
                    lambda: self._paths.evaluate(node, values, 0), batch, samples_of(self._calls[batch]))

    def _add_rows(self, layer_input: _Input, moments: SecondMoments, values: Values, batch: int) -> None:
        both = [self._paths.value(layer_input.value, values, path) for path in (0, -1)]
        first, last = both if both[0] is not both[1] else (None, both[1])
        if first is not None and first.shape != last.shape:  # data decide which rows there are: no pairs
            first = None
        if layer_input.use is not None:
            with self._naming_reader(layer_input):
                self._observe_matrices(layer_input, moments, values, batch, is_one=first is None)
            return
        held_out: tuple[Tensor, Tensor | None] | None = None
        if layer_input.required.holdout is not None:
            last, held_out_last = self._rows.split(layer_input.value, last, batch, layer_input.geometry)
            first, held_out_first = (None, None) if first is None else (
                self._rows.split(layer_input.value, first, batch, layer_input.geometry))
            held_out = held_out_last, held_out_first
        elif layer_input.geometry.is_pointwise:
            last = self._rows.rows(layer_input.value, last, batch)
            first = None if first is None else self._rows.rows(layer_input.value, first, batch)
        with self._naming_reader(layer_input):
            moments.observe(last, first, batch, held_out=held_out)

    def _observe_matrices(
        self, layer_input: _Input, moments: SecondMoments, values: Values, batch: int, *, is_one: bool
    ) -> None:
        """Adds the rows of each matrix of a stack; ``is_one``: both paths have the same input."""
        use = layer_input.use
        assert use is not None

        def rows(path: int) -> MatrixRows:
            def read(node: fx.Node) -> Any:
                value = self._paths.value(node, values, path)
                is_chosen = node is layer_input.value and layer_input.is_pointwise
                return self._rows.rows(node, value, batch) if is_chosen else value

            return use.rows(read)

        moments.observe_matrices(rows(-1), None if is_one else rows(0), batch)

    @contextmanager
    def _naming_reader(self, layer_input: _Input) -> Iterator[None]:
        """Names the layer in the errors of the body."""
        try:
            yield
        except CalibrationError as error:
            raise CalibrationError(f"{self._reader_of(layer_input).name}: {error}") from None

    def _warn_of_unfollowed(self) -> None:
        tokens = self._rows.followed
        if tokens is None:
            return
        unfollowed, unmasked = [], dict[str, tuple[str, ...]]()
        for layer, users in self._uses.items():
            read = [layer_input for node in users if (layer_input := self._input(layer, node)) is not None]
            lost = any(isinstance(tokens[each.value], str) or not each.is_pointwise for each in read)
            missed = next((found.inputs for each in read if isinstance(found := tokens[each.value], Unmasked)), None)
            if missed is not None:
                unmasked[layer.name] = missed
            elif lost or any(node in self._nested for node in users):
                unfollowed.append(layer.name)
        _warn_of_unfollowed(unfollowed)
        inputs = ", ".join(dict.fromkeys(name for each in unmasked.values() for name in each))
        _warn_of_all_rows(f"no mask covers tokens that come from the inputs {inputs}", list(unmasked))

    def _readers_of(self, values: set[fx.Node]) -> list[str]:
        """The names of the layers that read one of these values."""
        return [
            layer.name for layer, users in self._uses.items()
            if any((read := self._input(layer, node)) is not None and read.value in values for node in users)
        ]

    def _collected(self, layer: WeightedLayer) -> SecondMoments | None:
        """The summed statistics of all uses of a layer; statistics that no other layer needs are dropped."""
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
        total = SecondMoments(uses[0].geometry, uses[0].required)  # other layers may share the statistics in uses
        for use in uses:
            total.merge(use)
        return total

    def _stop(self, layer: WeightedLayer) -> fx.Node:
        """Where a layer's statistics are complete: at its last use, or where another layer reads the same first."""
        *earlier, last = self._uses[layer]
        read = None if earlier or last in self._nested else self._input(layer, last)
        return last if read is None else next(node for node, inputs in self._inputs.items() if read in inputs)

    def _input(self, layer: WeightedLayer, node: fx.Node) -> _Input | None:
        required, row, use = self._required[layer], row_of(node), layer.uses.get(node)
        if required is not None and use is not None:
            return _Input(use.data, layer.geometry, required, None if use.is_plain else use)
        if required is None or row is None or row.data_arg is None:
            return None
        value = node.args[row.data_arg]
        assert isinstance(value, fx.Node)
        return _Input(value, layer.geometry, required)

    def _only_weight(self, layer_input: _Input) -> Tensor | None:
        """The only weight that an input is multiplied with, if there is only one and it has few outputs."""
        required = layer_input.required
        if self._readers[layer_input] > 1 or required.block is not None or required.is_added_up or layer_input.use:
            return None
        layer = self._reader_of(layer_input)
        if len(self._uses[layer]) > 1:
            return None
        weight = weight_to_gemm(layer.weight.detach(), layer.geometry)
        return weight if takes_less_with_weight(*weight.shape[1:]) else None

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
            for read in () if self._paths.is_parameter(node) else node.all_input_nodes:
                parameter = self._paths.parameter(read)
                layer = layers.get(quantizers[parameter].site) if parameter in quantizers else None
                if layer is not None and self._paths.is_parameter(parameter):
                    uses.setdefault(layer, []).append(node)
        return uses

    def _last_uses(self) -> dict[fx.Node, list[fx.Node]]:
        """Node → the values that no node reads after it."""
        last = {read: node for node in self._nodes for read in (node, *self._paths.reads(node), *(
            read for each in self._inputs.get(node, ()) if each in self._routers
            for op in self._routers[each].ops for read in (op, *self._paths.reads(op))))}
        freed_after: dict[fx.Node, list[fx.Node]] = {}
        for read, node in last.items():
            freed_after.setdefault(node, []).append(read)
        return freed_after


def _warn_of_unfollowed(names: Sequence[str]) -> None:
    _warn_of_all_rows("tokens cannot be followed", names)


def _warn_of_all_rows(reason: str, names: Sequence[str]) -> None:
    """Warns that these layers count all rows, though some are no tokens that count."""
    if names:
        shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
        warnings.warn(f"valid: {reason} to the inputs of {len(names)} layers, where all rows count: {shown}",
                      stacklevel=2)
