"""The state of a layer between layer-wise methods: weight, encoding and bias so far, and statistics of its input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qtk.algorithms.output_error import OutputError, in_blocks
from qtk.algorithms.weight_grid import WeightGrid
from qtk.core.encoding import Encoding
from qtk.core.spec import QuantSpec
from qtk.errors import CalibrationError
from qtk.layerwise.weighted_layers import WeightedLayer
from qtk.moments.second_moments import SecondMoments
from qtk.numerics.affine import expand
from qtk.numerics.im2col import Geometry, gemm_to_weight, weight_to_gemm
from qtk.ops.simulate import simulate


@dataclass(frozen=True, slots=True, eq=False)
class LayerState:
    """The argument of a layer-wise method, which returns it with some fields replaced.

    Args:
        name: of the weight's site.
        geometry: how the layer multiplies its weight with its input.
        float_weight: the weight of the float model.
        weight: the weight so far, before its quantizer.
        encoding: of the weight, so far.
        bias: so far; ``None`` where the layer has none.
        float_bias: the bias of the float model.
        moments: statistics of the layer's input.
        error: of the output, as a function of the change of the weight.
        activation: the function that alone reads the output, if there is one.
        dtype: in which methods compute.
        loss: the output's error before and after the methods, without its constant; ``None`` where the last method does
            not know it.
        zeros: the weights that stay 0, which no method moves; ``None``: there are none.
        pruned: the float weight after two of four weights were pruned; ``None``: it has not been.
        moves_scales: whether GPTQ may choose the scales: nobody has frozen them, and no method has chosen them yet.
        rehearses: whether the result only tells which prior is best; methods that iterate long may stop earlier then.
    """

    name: str
    geometry: Geometry
    float_weight: Tensor
    weight: Tensor
    encoding: Encoding
    bias: Tensor | None
    float_bias: Tensor | None
    moments: SecondMoments
    error: OutputError
    activation: Callable[[Tensor], Tensor] | None = None
    dtype: torch.dtype = torch.float32
    loss: tuple[float, float] | None = None
    zeros: Tensor | None = None
    pruned: Tensor | None = None
    moves_scales: bool = False
    rehearses: bool = False

    @classmethod
    def of(cls, layer: WeightedLayer, moments: SecondMoments, dtype: torch.dtype = torch.float32) -> LayerState:
        """The state of a layer that no method has changed. Raises: CalibrationError if it has no encoding."""
        encoding = layer.quantizer.encoding
        if encoding is None:
            raise CalibrationError(f"{layer.name} has no encoding to start from; run sim.compute_encodings(data)")
        weight, bias = layer.weight.detach(), None if layer.bias is None else layer.bias.detach()
        matrix = weight_to_gemm(weight.to(dtype), layer.geometry)
        if moments.required.gram:
            gram, linear = moments.gram_as(dtype), moments.linear(matrix)
        else:  # no method needs the error
            gram, linear = matrix.new_zeros(len(matrix), matrix.shape[2], 1, 1), None
        return cls(
            layer.name, layer.geometry, weight, weight, encoding, bias, bias, moments,
            OutputError(gram, None if linear is None else in_blocks(linear, gram.shape[1])),
            layer.activation, dtype,
        )

    @property
    def is_rounded(self) -> bool:
        """Says whether a method has replaced the weight."""
        return self.weight is not self.unrounded

    @property
    def unrounded(self) -> Tensor:
        """The weight before any method: the float weight, or what pruning made of it."""
        return self.float_weight if self.pruned is None else self.pruned

    def to_gemm(self, weight: Tensor) -> Tensor:
        """A weight in GEMM layout. Shape: [groups, outputs, columns], in ``dtype``."""
        return weight_to_gemm(weight.detach().to(self.dtype), self.geometry)

    def from_gemm(self, matrix: Tensor) -> Tensor:
        """Inverse of ``to_gemm``, in the dtype of the weight."""
        return gemm_to_weight(matrix, self.geometry, self.weight.shape).to(self.weight.dtype)

    def simulated_weight(self) -> Tensor:
        """The weight after its quantizer. Shape: as ``weight``."""
        encoding = self.encoding
        with torch.no_grad():
            return simulate(self.weight.detach(), encoding.spec, encoding.scale, encoding.zero_point)

    def grid(self) -> WeightGrid:
        """Scale and zero point of every weight. Shape: as ``to_gemm``."""
        spec, scale, zero_point = self.encoding.spec, self.encoding.scale, self.encoding.zero_point
        scales, zero_points = (
            None if values is None else expand_scales(values, self.weight.shape, spec, self.geometry)
            for values in (scale, zero_point)
        )
        assert scales is not None
        grid = WeightGrid(
            spec, scales.contiguous(), None if zero_points is None else zero_points.round().to(torch.int32).contiguous()
        )
        return grid if self.zeros is None else grid.pruned(weight_to_gemm(self.zeros, self.geometry))

    def scale_index(self) -> Tensor:
        """Index of each weight's scale in the flattened scales. Shape: int32, as ``to_gemm``."""
        return scale_index_of(self.weight.shape, self.encoding, self.geometry)

    def current_error(self) -> float:
        """The error of the output with the quantized weight, without the constant; summed over outputs."""
        change = self.to_gemm(self.float_weight) - self.to_gemm(self.simulated_weight())
        return float(self.error.of(in_blocks(change, self.error.blocks)).sum(dtype=torch.float64))

    def of_outputs(self, outputs: slice) -> LayerState | None:
        """A rehearsal on some of the outputs; ``None`` where these are not rows of the weight, each with scales.

        The moments stay the statistics of the whole layer.
        """
        scale, zero_point, axis = self.encoding.scale, self.encoding.zero_point, self._output_axis
        if axis is None or scale.ndim <= axis or scale.shape[axis] != self.weight.shape[axis] \
                or self.encoding.spec.scale_format is not None:
            return None
        index = (*(slice(None),) * axis, outputs)
        encoding = Encoding(self.encoding.spec, scale[index], None if zero_point is None else zero_point[index])
        unrounded = self.unrounded[index]
        bias, float_bias = (None if each is None else each[outputs] for each in (self.bias, self.float_bias))
        return replace(
            self, float_weight=unrounded if self.pruned is None else self.float_weight[index],
            weight=self.weight[index] if self.is_rounded else unrounded,
            pruned=None if self.pruned is None else unrounded, zeros=None if self.zeros is None else self.zeros[index],
            encoding=encoding, bias=float_bias if self.bias is self.float_bias else bias, float_bias=float_bias,
            error=self.error.select(slice(None), outputs), loss=None, rehearses=True,
        )

    @property
    def _output_axis(self) -> int | None:
        """The axis of the weight that alone counts outputs; ``None`` if there is no such axis."""
        geometry = self.geometry
        if geometry.groups > 1 or geometry.transposed:
            return None
        if geometry.axes is None:
            return 0
        return geometry.axes.outputs[0] if len(geometry.axes.outputs) == 1 else None

    def updated(
        self, *, weight: Tensor | None = None, encoding: Encoding | None = None, loss: tuple[float, float] | None = None
    ) -> LayerState:
        """The state with another weight or encoding.

        Args:
            weight: in GEMM layout.
            encoding: of the weight.
            loss: the error of the output before and after the update, if it is known.
        """
        if loss is not None and self.loss is not None:
            loss = self.loss[0], loss[1]
        return replace(
            self, weight=self.weight if weight is None else self.from_gemm(weight), encoding=encoding or self.encoding,
            loss=loss, moves_scales=self.moves_scales and encoding is None,
        )


def expand_scales(values: Tensor, shape: Sequence[int], spec: QuantSpec, geometry: Geometry) -> Tensor:
    """Scales or zero points of a weight of ``shape``, repeated for every weight. Shape: as ``weight_to_gemm``, float32.

    >>> from qtk.core.dtypes import dtype
    >>> from qtk.core.granularity import PerBlock
    >>> spec = QuantSpec(dtype("int4"), PerBlock((1, 2)), symmetric=True)
    >>> expand_scales(torch.tensor([[1.0, 2.0]]), (1, 4), spec, Geometry.linear())
    tensor([[[1., 1., 2., 2.]]])
    """
    expanded = expand(values, shape, spec.granularity.block_size(len(shape))).expand(tuple(shape))
    return weight_to_gemm(expanded, geometry)


def scale_index_of(shape: Sequence[int], encoding: Encoding, geometry: Geometry) -> Tensor:
    """Index of each weight's scale in the flattened scales. Shape: int32 [groups, outputs, columns]."""
    scale = encoding.scale
    count = torch.arange(scale.numel(), dtype=torch.int32, device=scale.device).reshape(scale.shape)
    bits = expand_scales(count.view(torch.float32), shape, encoding.spec, geometry)  # moved as they are
    return bits.view(torch.int32)


def columns_per_scale(scale_index: Tensor) -> int | None:
    """Length of the runs of columns that share a scale, ``None`` if the runs are of several lengths.

    Shape: ``scale_index`` of integers, [groups, outputs, columns].

    >>> columns_per_scale(torch.tensor([[[0, 0, 1, 1]]])), columns_per_scale(torch.tensor([[[0, 1, 0, 1]]]))
    (2, None)
    """
    columns = scale_index.shape[-1]
    first = scale_index[0, 0]
    ends = (first[1:] != first[:-1]).nonzero().flatten() + 1
    length = int(ends[0]) if len(ends) else columns
    if columns % length:
        return None
    runs = scale_index.reshape(*scale_index.shape[:-1], columns // length, length)
    is_one_run_each = len(torch.unique(first)) == columns // length
    return length if is_one_run_each and bool((runs == runs[..., :1]).all()) else None
