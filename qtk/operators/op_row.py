"""A row of the op table."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import TypeAlias

from torch import fx


class Role(enum.Enum):
    """What an op does with values: computes new ones, moves, merges, creates or counts them."""

    COMPUTE = "compute"
    MOVEMENT = "movement"
    MERGE = "merge"
    CREATE = "create"
    COUNT = "count"


class Product(enum.Enum):
    """The matrix product that a weighted op computes of its input x and its weight W."""

    OUT_IN = "x Wᵀ, W [out, in]"
    IN_OUT = "x W, W [in, out]"
    CONV = "im2col(x) Wᵀ, W [out, in / groups, *kernel]"
    CONV_TRANSPOSE = "col2im(x W), W [in, out / groups, *kernel]"


class Scaling(enum.Enum):
    """What becomes of positive factors r of the channels of the values that an op reads.

    Which factors the op can pass on, and which its parameters can absorb, so that the function of the model is kept.
    """

    PINNED = "no factor may reach the op, and none leaves it"
    KEPT = "f(r x) = r f(x), element by element; other operands are pinned"
    CLAMPED = "as KEPT, if the bounds of the clamp are multiplied by r too"
    MOVED = "factors move as the elements do"
    WINDOWED = "f(r x) = r f(x) if r is the same over the spatial axes"
    REDUCED = "f(r x) = r f(x) if r is the same along the axes ``dim``"
    ADDED = "both operands, and so the result, have the same factors"
    MULTIPLIED = "one operand passes its factors to the result; a parameter per channel absorbs them on both sides"
    DIVIDED = "the numerator passes its factors to the result"
    WEIGHTED = "the weight absorbs the factors of input and output, the bias the factors of the output"
    COLUMNS = "the columns of the weight absorb the factors of the output"
    SCALE_SHIFT = "scale and shift per channel absorb the factors of input and output"
    CHANNEL_NORM = "the input is pinned; weight and bias [C] absorb the factors of the output, axis 1"
    TRAILING_NORM = "the input is pinned; weight and bias, shaped as the last axes, absorb the factors of the output"
    ATTENTION = "the values pass their factors to the result, queries and keys are pinned"
    CONSTANT = "a created constant: of the operands only the shape is read"


class Mask(enum.Flag):
    """What an op does with an attention mask: −inf, or a number like it, at masked positions."""

    NONE = 0
    READS = enum.auto()
    """Turns −inf into nothing: a mask is made for such an op."""
    MAKES = enum.auto()
    """Makes −inf, or puts it in."""
    KEEPS = enum.auto()
    """Element by element, the result has the mask of an operand."""


class Feeding(enum.Enum):
    """Whether a value feeds what the result of an op feeds that reads it."""

    RESULT = "the result belongs to what the op adds up, averages, bounds or makes positive"
    SCALED = "the result belongs to the value that the op multiplies by a parameter or a number, or divides by one; "\
             "the relative error of either of two values is the result's, which feeds the ops that need that"
    ADDED = "the result belongs to the first value, to which the op adds a product of the others, as ``SCALED``"
    ORDER = "the result is in the order of what the op reads, and feeds the ops that look for the largest values"
    LARGEST = "the op looks for the largest values; what reads its result is not fed"
    RELATIVE = "the op needs a small relative error of what it reads; what reads its result is not fed"


class Precision(enum.Enum):
    """Which error of its operands decides about the error of an op's result."""

    FRACTION = "the absolute one: only their fraction or phase matters, less than a step of a wide range"
    ABSOLUTE = "the absolute one, if it is what matters of the result"
    EXPONENT = "the absolute one, which becomes the relative error of the result"


class Tokens(enum.Enum):
    """Where the axes [samples, tokens] of an op's operands are in its result."""

    ELEMENTWISE = "where they are in the operand of the result's shape; others may be broadcast"
    SELECTED = "as in the operand, without the axis ``dim``"
    REDUCED = "as in the operand, without the axes ``dim``, or with their length 1"
    RESHAPED = "in the result's shape, which has the elements of the operand in their order"
    PERMUTED = "as ``input_axis`` says"
    LOOKED_UP = "as in the operand, with a last axis of features"
    MULTIPLIED = "as in the rows of the left operand, else in the columns of the right one"
    REORDERED = "as in the operand, if its elements stay along these axes"
    QUERIES = "as in the queries of attention"


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
        product: the matrix product of input and weight; ``None``: the output is not one matrix product, and layer-wise
            methods skip the op.
        data_arg: position of the argument that the weight is multiplied with; ``None``: no single one is.
        bias: argument position of the bias.
        divisors: argument positions at which a 0 makes the result infinite.
        edged: its function, or the derivative of it, is finite on one side alone of a value that its operand may have.
        input_axis: of a movement op, maps an axis of the output to an axis of the input; ``None``: no axis maps.
        activation: it is an elementwise activation function of one value, which layer-wise methods may apply to the
            output of a layer.
        arithmetic: applied to numbers it gives a number, which the pattern matcher computes (constant folding).
        fresh: its result never shares memory with an input.
        counts: its result counts if its operands do; of movement and merges this is always so.
        mask: see ``Mask``; a supergroup may name an op that makes one, although its role is movement.
        feeding: see ``Feeding``; ``None``: its operands feed the op itself alone, unless it moves or merges them.
        precision: see ``Precision``; ``None``: an error matters by its share of the range.
        tokens: see ``Tokens``.
        rectifier: it returns what is not negative as it is.
        scaling: see ``Scaling``; ``None``: as its role says (see ``scales_as``).
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
    edged: bool = False
    input_axis: InputAxis | None = None
    activation: bool = False
    arithmetic: bool = False
    fresh: bool = False
    counts: bool = False
    mask: Mask = Mask.NONE
    feeding: Feeding | None = None
    precision: Precision | None = None
    tokens: Tokens = Tokens.ELEMENTWISE
    rectifier: bool = False
    scaling: Scaling | None = None
    inside: str | None = None

    @property
    def multiplies(self) -> bool:
        """Says whether it computes products of what it reads and weights, or of two values that it reads."""
        return self.product is not None or self.weight_axes is not None or self.inside is not None

    @property
    def scales_as(self) -> Scaling:
        """Returns what becomes of the factors of channels: ``scaling``, else what is true of every op of its role."""
        by_role = {Role.COMPUTE: Scaling.PINNED, Role.COUNT: Scaling.PINNED, Role.CREATE: Scaling.CONSTANT}
        return self.scaling or by_role.get(self.role, Scaling.MOVED)

    @property
    def keeps_elements(self) -> bool:
        """Says whether elements of the result are elements of operands: moved, or merged."""
        return self.role in (Role.MOVEMENT, Role.MERGE)

    @property
    def names(self) -> tuple[str, str]:
        """The names by which config rules match the op."""
        return (self.kind, self.family or self.kind)


def out_in(op: fx.Node, weight: fx.Node) -> tuple[int, int] | None:
    """The channel axes of most weights: ``[out, in, …]``; others are in ``qtk.operators.op_axes``."""
    return 0, 1
