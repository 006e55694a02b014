"""The values of one call of a graph with their label tensors beside them, and what every rule asks of them."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

from torch import Tensor, fx

from qtk.channels.absorbers import Absorbers, ParameterOperand
from qtk.channels.channel_classes import PINNED, ZERO, ChannelClasses, constant_labels
from qtk.channels.channel_findings import Findings
from qtk.graph.captured_graph import CapturedGraph
from qtk.graph.flow import Flow, reads_shape_only
from qtk.graph.written_buffers import is_input
from qtk.operators.op_row import OpRow

Labels: TypeAlias = Tensor | ParameterOperand | list["Labels"] | None
"""Of a value: a label tensor; a parameter; ``None`` if it is no float tensor; one for each element of a tuple."""


class LabelState:
    """The live values of a call, and their labels.

    Args:
        graph: without quantizers.
        classes: the variables. Changed.
        absorbers: the parameters. Changed.
        findings: what is found. Changed.
    """

    def __init__(
        self, graph: CapturedGraph, classes: ChannelClasses, absorbers: Absorbers, findings: Findings
    ) -> None:
        self.graph = graph
        self.flow = Flow(graph.graph)
        self.classes = classes
        self.absorbers = absorbers
        self.findings = findings
        self.values: dict[fx.Node, Any] = {}
        self.labels: dict[fx.Node, Labels] = {}
        self._varying: set[fx.Node] = set()
        for node in graph.graph.nodes:
            reads = not self._varying.isdisjoint(node.all_input_nodes) and not reads_shape_only(node)
            if is_input(node) or reads:
                self._varying.add(node)

    def varies(self, argument: object) -> bool:
        """Says whether an operand depends on the data of the call, not only on parameters and shapes."""
        return argument in self._varying

    def operand(self, argument: object) -> ParameterOperand | None:
        """The parameter that is an operand; ``None`` if it is none."""
        labels = self.labels.get(argument) if isinstance(argument, fx.Node) else None
        return labels if isinstance(labels, ParameterOperand) else None

    def name(self, argument: object) -> str | None:
        """The name of the parameter that is an operand; ``None`` if it is none."""
        operand = self.operand(argument)
        return None if operand is None else operand.name

    def of(self, argument: object) -> Tensor:
        """Labels of an operand; a parameter as a value; 0 and ±∞ as ``ZERO``, other numbers and integers pinned."""
        labels = self.labels.get(argument) if isinstance(argument, fx.Node) else None
        if isinstance(labels, ParameterOperand):
            if labels.shape.numel() == 1:
                self.absorbers.pin(labels.name)
                return constant_labels(labels.shape)
            return self.absorbers.elements(labels)
        if isinstance(labels, Tensor):
            return labels
        if isinstance(argument, fx.Node):
            value = self.values[argument]
            return constant_labels(value.shape if isinstance(value, Tensor) else ())
        return constant_labels((), ZERO if argument is None or is_fixed_point(argument) else PINNED)

    def added(self, argument: object) -> Tensor:
        """Labels of what an op adds per channel: of a single channel too it absorbs."""
        operand = self.operand(argument)
        return self.of(argument) if operand is None else self.absorbers.elements(operand)

    def pin(self, argument: object) -> None:
        """Pins an operand: a value, a parameter, or all elements of a tuple."""
        labels = self.labels.get(argument) if isinstance(argument, fx.Node) else None
        for label in labels if isinstance(labels, list) else [labels]:
            if isinstance(label, ParameterOperand):
                self.absorbers.pin(label.name)
            elif isinstance(label, Tensor):
                self.classes.pin(label)

    def pin_operands(self, node: fx.Node, *, but: tuple[object, ...] = ()) -> None:
        """Pins every operand of an op, but some."""
        for argument in node.all_input_nodes:
            if argument not in but:
                self.pin(argument)

    def pinned_result(self, node: fx.Node) -> Labels:
        """Pinned labels for every value that an op makes."""
        def pinned(value: Any) -> Labels:
            if isinstance(value, (list, tuple)):
                return [pinned(element) for element in value]
            return constant_labels(value.shape) if is_float(value) else None

        return pinned(self.values[node])

    def result(self, node: fx.Node, labels: Tensor) -> Labels:
        """The labels for the first value an op makes; the others are pinned."""
        result = self.pinned_result(node)
        if not isinstance(result, list):
            return labels if result is not None else None
        return [labels, *result[1:]]

    def first_value(self, node: fx.Node) -> Tensor:
        """The first tensor that an op makes."""
        value = self.values[node]
        first = value[0] if isinstance(value, (list, tuple)) else value
        assert isinstance(first, Tensor)
        return first

    def spread(self, labels: Tensor, node: fx.Node) -> Labels:
        """The labels for the first value an op makes, broadcast to its shape."""
        return self.result(node, labels.expand(self.first_value(node).shape))


def is_float(value: object) -> bool:
    """Says whether a value is a tensor of real numbers."""
    return isinstance(value, Tensor) and value.is_floating_point()


def is_fixed_point(number: object) -> bool:
    """Says whether a positive factor leaves the number as it is: 0, ±∞."""
    return isinstance(number, (int, float)) and (number == 0 or math.isinf(number))


def pinned(state: LabelState, node: fx.Node, row: OpRow | None) -> Labels:
    """The rule of ops that no factor may reach."""
    state.pin_operands(node)
    return state.pinned_result(node)
