"""Which channels of a model may be multiplied by positive factors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from qtk.calls.inputs import input_leaves
from qtk.capture.prepared_model import PreparedGraph
from qtk.channels.absorbers import Absorbers
from qtk.channels.channel_classes import PINNED, ChannelClasses
from qtk.channels.channel_findings import Findings
from qtk.channels.label_walk import LabelWalk
from qtk.errors import SpecError
from qtk.graph.captured_graph import CapturedGraph
from qtk.graph.graphs import graphs, roots
from qtk.nn.eval_mode import evaluating
from qtk.operators.targets import attribute
from qtk.torch_private import pytree


@dataclass(frozen=True, slots=True, eq=False)
class WeightedInput:
    """The data input of a convolution, a linear layer, or a matrix product with a parameter.

    Args:
        graph: the graph.
        node: the op.
        value: what it reads.
        channel_axis: the axis of the value that is contracted.
        variables: int64 [C], the class of every input channel, −1 if its factor must be 1.
        weight: name of the parameter; ``None`` if the weight is computed.
        weight_index: int64, broadcastable to the parameter: the input channel that each element multiplies, −1 for
            elements the op does not read; ``None`` as ``weight``.
    """

    graph: CapturedGraph
    node: fx.Node
    value: fx.Node
    channel_axis: int
    variables: Tensor
    weight: str | None
    weight_index: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class WeightedOutput:
    """A parameter that absorbs the factors of the channels of what an op makes.

    Args:
        graph: the graph.
        node: the op.
        kind: of the op: ``conv2d``, ``linear``, ``matmul``, ``embedding``, ``layer_norm``, ``mul``.
        weight: name of the parameter.
        bias: name of the parameter that the same op adds.
        variables: int64 [C], the class of every output channel, −1 if its factor must be 1.
        weight_index: int64, broadcastable to the parameter: the output channel of each element, −1 for none.
        smallest: [C] the smallest value of each channel that was seen; ``None`` if the op is no matrix product.
    """

    graph: CapturedGraph
    node: fx.Node
    kind: str
    weight: str
    bias: str | None
    variables: Tensor
    weight_index: Tensor
    smallest: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class ClampedValue:
    """A clamp (ReLU6, hardtanh) whose bounds must be multiplied by the factors of its channels.

    Args:
        graph: the graph.
        node: the op.
        channel_axis: the axis of the channels.
        variables: int64 [C], the class of every channel, −1 if its factor must be 1.
        lower: its lower bound, ``None`` if it has none.
        upper: its upper bound, ``None`` if it has none.
    """

    graph: CapturedGraph
    node: fx.Node
    channel_axis: int
    variables: Tensor
    lower: float | None
    upper: float | None


class ChannelScales:
    """Which channels of which values may be multiplied by positive factors, parameters absorbing them.

    Every channel has a variable, its factor. Channels whose factors must be equal form a class, named by one of its
    variables; a class is free if any positive factor keeps the function of the model.

    >>> import qtk
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    >>> prepared = qtk.prepare_model(net, torch.randn(4, 2))
    >>> scales = ChannelScales(prepared, (torch.randn(4, 2),), {})
    >>> [(read.weight, bool(scales.free[read.variables].all())) for read in scales.inputs if read.variables.min() >= 0]
    [('2.weight', True)]

    Doubling the hidden channels doubles the rows of the first weight and halves the columns of the second:

    >>> factors = torch.where(scales.free, 2.0, 1.0)
    >>> {name: factor.flatten().tolist() for name, factor in scales.parameter_factors(factors).items()}
    {'0.bias': [2.0, 2.0, 2.0], '0.weight': [2.0, 2.0, 2.0], '2.weight': [0.5, 0.5, 0.5]}

    Args:
        model: a prepared model without quantizers. It is evaluated in eval mode.
        args: positional example inputs.
        kwargs: keyword example inputs.

    Attributes:
        num_variables: how many variables there are.
        free: bool [num_variables], whether a variable names a free class.
        clamped: bool [num_variables], whether a variable names a class that passes through a clamp: it is free only if
            the bounds in ``clamps`` are multiplied by its factor too.
        inputs: every data input of a weighted op, in graph order, of all graphs.
        outputs: every parameter along whose output axis factors can be absorbed.
        clamps: every clamp that passes factors on.
        values: op → the classes of the elements of the value it makes, −1 where their factor must be 1; of length 1
            along axes where they do not vary. Ops all of whose elements are pinned are left out.
        added: parameter → the classes of its elements, of the parameters that are added: biases, position embeddings.
    """

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        classes = ChannelClasses()
        self._absorbers = Absorbers(model, classes)
        findings = Findings()
        with evaluating(model), torch.no_grad():
            calls = _record(model, args, kwargs, self._absorbers)
            for graph, leaves in calls:
                LabelWalk(graph, classes, self._absorbers, findings).run(leaves)
        self._pin_unvisited(model, {id(graph) for graph, _ in calls})
        self._absorbers.close()
        for a, b, product in findings.products:
            _carry_one(classes, a, b, product)
        self._representatives = classes.representatives()
        self.num_variables = classes.count
        names = self._representatives.unique()  # type: ignore[no-untyped-call]
        self.free = torch.zeros(classes.count, dtype=torch.bool)
        self.free[names[names > PINNED]] = True
        self.clamped = torch.zeros_like(self.free)
        self._collect(findings)

    def parameter_factors(self, factors: Tensor) -> dict[str, Tensor]:
        """Name → factor, broadcastable to the parameter, of every parameter that changes.

        Args:
            factors: [num_variables] positive, the factor of each free class; 1 leaves it as it is, and everything that
                names no free class must be 1.

        Raises: SpecError if a factor is not positive and finite, or belongs to no free class.
        """
        if factors.shape != self.free.shape or not bool((factors.isfinite() & (factors > 0)).all()):
            raise SpecError(f"factors must be {self.num_variables} positive finite numbers")
        if bool((factors[~self.free] != 1).any()):
            raise SpecError("only the factors of free classes may differ from 1")
        return self._absorbers.factors(factors.double()[self._representatives])

    def scaled_values(self, factors: Tensor) -> list[fx.Node]:
        """The ops whose values have a channel that ``factors`` multiplies by another number than 1, in graph order.

        Shape: ``factors`` [num_variables], as for ``parameter_factors``.
        """
        padded = torch.cat([factors, factors.new_ones(1)])
        return [node for node, variables in self.values.items() if bool((padded[variables] != 1).any())]

    def _named(self, labels: Tensor) -> Tensor:
        named = self._representatives[labels.long()]
        return torch.where(named > PINNED, named, -1)

    def _collect(self, findings: Findings) -> None:
        named = {node: self._named(labels) for node, labels in reversed(findings.values)}
        free = [node for node, variables in named.items() if bool((variables >= 0).any())]
        self.values = {node: named[node] for node in reversed(free)}
        self.inputs = [
            WeightedInput(
                graph, read.node, read.value, read.axis, self._named(read.labels), read.parameter, read.index
            )
            for graph, read in findings.reads
        ]
        self.outputs = [
            WeightedOutput(
                graph, write.node, write.kind, write.parameter, write.bias, self._named(write.labels), write.index,
                write.smallest,
            )
            for graph, write in findings.writes
        ]
        self.clamps = [
            ClampedValue(graph, clamp.node, clamp.axis, self._named(clamp.labels), clamp.lower, clamp.upper)
            for graph, clamp in findings.clamps
        ]
        for clamp in self.clamps:
            self.clamped[clamp.variables[clamp.variables >= 0]] = True
        scaling = {output.weight for output in self.outputs}
        self.added = {
            name: self._named(base) for name, base in self._absorbers.bases.items() if name not in scaling
        }

    def _pin_unvisited(self, model: nn.Module, visited: set[int]) -> None:
        """Pins parameters that are read where nothing was seen: in graphs that the example inputs do not reach, or by
        modules that are in no graph.
        """
        for graph in graphs(model).values():
            for node in graph.graph.find_nodes(op="get_attr") if id(graph) not in visited else ():
                self._absorbers.pin_tensor(attribute(graph, str(node.target)))
        inside = {id(module) for graph in graphs(model).values() for module in graph.modules()}
        for module in model.modules():
            for parameter in module.parameters(recurse=False) if id(module) not in inside else ():
                self._absorbers.pin_tensor(parameter)


def _carry_one(classes: ChannelClasses, a: Tensor, b: Tensor, product: Tensor) -> None:
    """Propagates the channel factors of one factor of a product: of the free factor, of the first if both are."""
    representatives = classes.representatives()
    sides = [representatives[side.long()] for side in (a, b)]
    free = [side[side > PINNED].unique() for side in sides]  # type: ignore[no-untyped-call]
    if bool(torch.isin(free[0], free[1]).any()):
        for labels in (a, b, product):
            classes.pin(labels)
        return
    carrier, other = (a, b) if len(free[0]) else (b, a)
    classes.pin(other)
    classes.unify(carrier, product)


def _record(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], absorbers: Absorbers
) -> list[tuple[CapturedGraph, list[object]]]:
    """The calls of the model's outermost graphs, one for each shape of inputs, with their leaves.

    A model with Python of its own around them is run.
    """
    if isinstance(model, PreparedGraph):
        graph = model.variant(args, dict(kwargs))
        assert isinstance(graph, PreparedGraph)
        return [(graph, graph.leaves(args, dict(kwargs)))]
    calls: dict[object, tuple[CapturedGraph, list[object]]] = {}
    outside = _ParametersReadOutside(absorbers)

    def enter(graph: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert isinstance(graph, CapturedGraph)
        leaves = input_leaves(graph.graph, args, kwargs)
        shapes = tuple(leaf.shape if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        calls.setdefault((id(graph), str(shapes)), (graph, leaves))
        outside.depth += 1

    def leave(graph: nn.Module, args: object, output: object) -> None:
        outside.depth -= 1

    with _hooked(model, enter, leave), outside:
        model(*args, **kwargs)
    return list(calls.values())


@contextmanager
def _hooked(model: nn.Module, enter: Callable[..., None], leave: Callable[..., None]) -> Iterator[None]:
    handles = []
    for root in roots(model).values():
        for graph in (root, *root.variants.values()):
            handles += [
                graph.register_forward_pre_hook(enter, with_kwargs=True), graph.register_forward_hook(leave)
            ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _ParametersReadOutside(TorchFunctionMode):
    """Pins the parameters that a model's own Python reads, outside its graphs."""

    def __init__(self, absorbers: Absorbers) -> None:
        super().__init__()
        self._absorbers = absorbers
        self.depth = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.depth and (func.__name__ in ("item", "tolist") or _holds_a_tensor(result)):
            for leaf in pytree.tree_leaves((args, kwargs)):
                self._absorbers.pin_tensor(leaf)
        return result


def _holds_a_tensor(value: object) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))


