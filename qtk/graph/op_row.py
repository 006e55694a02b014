"""What the op table says about one operator."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import TypeAlias

from torch import fx


class Role(enum.Enum):
    """What an op does with values."""

    COMPUTE = "compute"
    MOVEMENT = "movement"
    MERGE = "merge"
    CREATE = "create"


class Product(enum.Enum):
    """How the output of a weighted op is a matrix product of its input x and its weight W."""

    OUT_IN = "x Wᵀ, W [out, in]"
    IN_OUT = "x W, W [in, out]"
    CONV = "im2col(x) Wᵀ, W [out, in / groups, *kernel]"
    CONV_TRANSPOSE = "col2im(x W), W [in, out / groups, *kernel]"


WeightAxes: TypeAlias = Callable[[fx.Node, fx.Node], tuple[int, int] | None]
"""(op, its weight) → axes of the weight that are its output and input channels, ``None`` if none."""

InputAxis: TypeAlias = Callable[[fx.Node, fx.Node, int], int | None]
"""(a moved value, the value it was moved from, axis of the first) → that axis in the second, ``None`` if none."""


@dataclass(frozen=True, slots=True)
class OpRow:
    """All knowledge about one operator.

    Args:
        kind: the name config rules use (``conv2d``).
        role: see ``Role``.
        family: a wider name that rules may use as well (``conv``).
        inputs: argument positions that carry values; ``None``: every tensor argument.
        weights: argument positions that hold a weight when their value is made from parameters alone.
        weight_axes: finds the channel axes of such a weight; ``None``: it has no output channels and gets one scale.
        product: how the weight meets its input; ``None``: the output is not one matrix product, and layer-wise
            methods pass the op by.
        data_arg: position of the input that the weight is multiplied with; ``None``: no argument alone is.
        bias: argument position of the bias.
        divisors: argument positions at which a 0 makes the result infinite.
        input_axis: of a movement op, follows an axis of the output back to the input; ``None``: no axis survives.
        activation: it is an elementwise activation function of one value, which layer-wise methods may apply to the
            output of a layer.
        arithmetic: with numbers in place of tensors it makes a number, which spelled-out formulas then contain.
        fresh: its result never shares memory with an input.
        mask: it masks values, so a supergroup may name it even where it merely moves them.
        inside: of a composite, the name by which config rules match all ops inside it (``lstm_cell``).
    """

    kind: str
    role: Role
    _: KW_ONLY
    family: str | None = None
    inputs: tuple[int, ...] | None = None
    weights: tuple[int, ...] = ()
    weight_axes: WeightAxes | None = None
    product: Product | None = None
    data_arg: int | None = 0
    bias: int | None = None
    divisors: tuple[int, ...] = ()
    input_axis: InputAxis | None = None
    activation: bool = False
    arithmetic: bool = False
    fresh: bool = False
    mask: bool = False
    inside: str | None = None

    @property
    def names(self) -> tuple[str, str]:
        """The names by which config rules match the op."""
        return (self.kind, self.family or self.kind)
