"""A layer on its way through layer-wise methods: its weight, encoding and bias as they are to be, and its input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from qtk.algorithms.grid import Grid
from qtk.algorithms.output_error import OutputError, in_blocks
from qtk.core.encoding import Encoding
from qtk.core.spec import QuantSpec
from qtk.errors import CalibrationError
from qtk.layerwise.second_moments import SecondMoments, Wanted
from qtk.layerwise.weighted_layers import WeightedLayer
from qtk.numerics.affine import expand
from qtk.numerics.im2col import Geometry, matrix_of, weight_of
from qtk.ops.simulate import simulate


@dataclass(frozen=True, slots=True, eq=False)
class LayerState:
    """What a step gets, and gives back changed.

    Args:
        name: of the weight's site.
        geometry: how the weight meets its input.
        original: the weight of the float model.
        weight: the weight as it is to be, before its quantizer.
        encoding: of the weight.
        bias: to be; ``None`` where the layer has none.
        moments: of the input.
        error: of the output.
        activation: the function that alone reads the output, if there is one.
        dtype: to compute in.
        loss: the error before and after, where a step knows them.
    """

    name: str
    geometry: Geometry
    original: Tensor
    weight: Tensor
    encoding: Encoding
    bias: Tensor | None
    moments: SecondMoments
    error: OutputError
    activation: Callable[[Tensor], Tensor] | None = None
    dtype: torch.dtype = torch.float32
    loss: tuple[float, float] | None = None

    @classmethod
    def of(cls, layer: WeightedLayer, moments: SecondMoments, dtype: torch.dtype = torch.float32) -> LayerState:
        """A layer as it is. Raises: CalibrationError if it has no encoding."""
        encoding = layer.quantizer.encoding
        if encoding is None:
            raise CalibrationError(f"{layer.name} has no encoding to start from; run sim.compute_encodings(data)")
        weight = layer.weight.detach()
        matrix = matrix_of(weight.to(dtype), layer.geometry)
        if moments.wanted.gram:
            gram, linear = moments.gram_as(dtype), moments.linear(matrix)
        else:  # nobody asks for errors
            gram, linear = matrix.new_zeros(len(matrix), matrix.shape[2], 1, 1), None
        return cls(
            layer.name, layer.geometry, weight, weight, encoding, None if layer.bias is None else layer.bias.detach(),
            moments, OutputError(gram, None if linear is None else in_blocks(linear, gram.shape[1])),
            layer.activation, dtype,
        )

    def matrix(self, weight: Tensor) -> Tensor:
        """A weight, as the rows of the input meet it. Shape: [groups, outputs, columns], in ``dtype``."""
        return matrix_of(weight.detach().to(self.dtype), self.geometry)

    def weight_from(self, matrix: Tensor) -> Tensor:
        """Inverse of ``matrix``, in the dtype of the weight."""
        return weight_of(matrix, self.geometry, self.weight.shape).to(self.weight.dtype)

    def simulated(self, encoding: Encoding | None = None) -> Tensor:
        """The weight after its quantizer, or one with another encoding. Shape: as ``weight``."""
        chosen = encoding or self.encoding
        with torch.no_grad():
            return simulate(self.weight.detach(), chosen.spec, chosen.scale, chosen.zero_point)

    def grid(self) -> Grid:
        """The numbers each weight can become, as a matrix."""
        scale, zero = self.encoding.scale, self.encoding.zero_point
        return Grid(self.encoding.spec, self.spread(scale).contiguous(),
                    None if zero is None else self.spread(zero).round().to(torch.int32).contiguous())

    def spread(self, values: Tensor) -> Tensor:
        """Numbers of scales at every weight. Shape: ``values`` the qparam shape; result as ``matrix``, float32."""
        return spread(values, self.weight.shape, self.encoding.spec, self.geometry)

    def owner(self) -> Tensor:
        """The scale that each weight goes by, counted flat. Shape: int64, as ``matrix``."""
        return owner_of(self.weight.shape, self.encoding, self.geometry)

    def error_now(self) -> float:
        """The error of the output that the quantized weight makes, without the constant; summed over outputs."""
        change = self.matrix(self.original) - self.matrix(self.simulated())
        return float(self.error.of(in_blocks(change, self.error.gram.shape[1])).sum(dtype=torch.float64))

    def better(
        self, *, weight: Tensor | None = None, encoding: Encoding | None = None, loss: tuple[float, float] | None = None
    ) -> LayerState:
        """The problem with another weight, as a matrix, or another encoding, and what that gains.

        Args:
            weight: the matrix.
            encoding: the encoding.
            loss: the error of the output before and with it, if that is known.
        """
        changed = replace(
            self, weight=self.weight if weight is None else self.weight_from(weight), encoding=encoding or self.encoding
        )
        before, after = loss or (self.error_now(), changed.error_now())
        return replace(changed, loss=(before if self.loss is None else self.loss[0], after))


class Step(Protocol):
    """One layer-wise method; a frozen dataclass of plain numbers."""

    def wants(self, block: int | None) -> Wanted:
        """What it must know of the input of a layer whose scales go by blocks of so many columns, ``None``: all."""
        ...

    def apply(self, problem: LayerState) -> LayerState:
        """The problem with a better weight, encoding or bias. Raises: CalibrationError if it cannot."""
        ...

    def refuses(self, spec: QuantSpec) -> str:
        """Why weights of a spec cannot be dealt with; empty if they can."""
        ...


def spread(values: Tensor, shape: Sequence[int], spec: QuantSpec, geometry: Geometry) -> Tensor:
    """Numbers of scales at every weight of a tensor of ``shape``. Shape: [groups, outputs, columns], float32."""
    whole = expand(values, shape, spec.granularity.block_size(len(shape))).expand(tuple(shape))
    return matrix_of(whole, geometry)


def owner_of(shape: Sequence[int], encoding: Encoding, geometry: Geometry) -> Tensor:
    """The scale that each weight goes by, counted flat. Shape: int64 [groups, outputs, columns]."""
    scale = encoding.scale
    count = torch.arange(scale.numel(), device=scale.device).reshape(scale.shape)
    high, low = (  # in two halves, for float32 holds no larger integers
        spread(half.to(torch.float32), shape, encoding.spec, geometry).to(torch.int64)
        for half in (count >> 16, count & 0xFFFF)
    )
    return high << 16 | low


def block_of(owner: Tensor) -> int | None:
    """Columns next to each other that go by one scale in every output; ``None`` if blocks are no runs of one length.

    Shape: ``owner`` int64 [groups, outputs, columns].
    """
    columns = owner.shape[-1]
    first = owner[0, 0]
    ends = (first[1:] != first[:-1]).nonzero().flatten() + 1
    block = int(ends[0]) if len(ends) else columns
    if columns % block:
        return None
    runs = owner.reshape(*owner.shape[:-1], columns // block, block)
    whole = len(torch.unique(first)) == columns // block  # no scale has columns elsewhere
    return block if whole and bool((runs == runs[..., :1]).all()) else None
