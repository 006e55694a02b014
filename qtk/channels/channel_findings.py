"""What a walk through the graphs finds out about channels, in variables that are not yet classes."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, fx

from qtk.graph.captured_graph import CapturedGraph


@dataclass(frozen=True, slots=True, eq=False)
class ChannelRead:
    """An op reads the channels of a value.

    Args:
        node: the op.
        value: what it reads.
        axis: the channel axis of the value.
        labels: [C] variables of the channels.
        parameter: name of the weight; ``None`` if it is computed.
        index: the channel that each element of the weight multiplies, broadcastable to it, −1 for none.
    """

    node: fx.Node
    value: fx.Node
    axis: int
    labels: Tensor
    parameter: str | None
    index: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class ChannelWrite:
    """A parameter scales the channels of what an op makes.

    Args:
        node: the op.
        kind: of the op.
        parameter: name of the parameter.
        bias: name of the parameter that the op adds.
        labels: [C] variables of the channels.
        index: the channel of each element of the parameter, broadcastable to it, −1 for none.
        smallest: [C] the smallest value of each channel in this call; ``None`` for ops that are no matrix products.
    """

    node: fx.Node
    kind: str
    parameter: str
    bias: str | None
    labels: Tensor
    index: Tensor
    smallest: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Clamp:
    """A clamp, whose bounds must be multiplied by the factors too.

    Args:
        node: the op.
        axis: the axis along which factors vary.
        labels: [C] variables of the channels.
        lower: its lower bound, ``None`` if it has none.
        upper: its upper bound.
    """

    node: fx.Node
    axis: int
    labels: Tensor
    lower: float | None
    upper: float | None


@dataclass(slots=True)
class Findings:
    """What the walks through all graphs of a model have found, in graph order.

    ``products``: variables of both factors of a product, and of the result; which of them passes factors follows later.
    ``values``: every op that makes a float value, with its labels, of length 1 along axes where they do not vary.
    """

    reads: list[tuple[CapturedGraph, ChannelRead]] = field(default_factory=list)
    writes: list[tuple[CapturedGraph, ChannelWrite]] = field(default_factory=list)
    clamps: list[tuple[CapturedGraph, Clamp]] = field(default_factory=list)
    products: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    values: list[tuple[fx.Node, Tensor]] = field(default_factory=list)
