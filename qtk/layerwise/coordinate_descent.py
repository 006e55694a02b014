"""Coordinate descent on a layer: moves one weight after the other to its best grid point, and the scales with them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from qtk.algorithms.code_scales import code_scales
from qtk.algorithms.coordinate_descent import coordinate_descent
from qtk.core.bounds import check_count
from qtk.core.dtypes import FloatDtype
from qtk.core.encoding import Encoding
from qtk.core.spec import QuantSpec
from qtk.layerwise.gptq import Gptq
from qtk.layerwise.layer_state import LayerState, columns_per_scale
from qtk.layerwise.second_moments import RequiredStatistics
from qtk.public import public

MOST_PASSES = 1000


@public
@dataclass(frozen=True, slots=True)
class CoordinateDescent:
    """Coordinate descent on rounding and scales (QuantEase, arXiv 2309.01885), which no pass can make worse.

    It starts from the weights that an earlier method has rounded, otherwise from GPTQ's.

    Args:
        passes: over all columns, at most; it ends when a pass changes nothing.
        scales: before each pass, give every scale its best value for the present codes; scales stored in few bits, and
            those of scattered columns, stay what they are.

    Raises: CalibrationError if ``passes`` is out of range.
    """

    needs_bias: ClassVar[bool] = False

    passes: int = 5
    scales: bool = True

    def __post_init__(self) -> None:
        check_count("passes of coordinate_descent", self.passes, MOST_PASSES)

    @property
    def searches_scale(self) -> bool:
        return self.scales

    def min_rows(self, columns: int) -> int:
        return Gptq().min_rows(columns)

    def refuses(self, spec: QuantSpec) -> str | None:
        return None

    def required_statistics(self, block: int | None) -> RequiredStatistics:
        return RequiredStatistics()

    def apply(self, state: LayerState) -> LayerState:
        """Raises: CalibrationError as GPTQ, if it starts from it."""
        start = state if state.is_rounded else Gptq().apply(state)
        weight, encoding = state.to_gemm(state.float_weight), start.encoding
        rounded = state.to_gemm(start.simulated_weight())
        half_gradient, product = state.error.half_gradient((weight - rounded)[:, None])[:, 0], None
        if self.scales:
            product = weight @ state.error.gram[:, 0]
        for _ in range(self.passes):
            present, present_encoding = rounded, encoding
            if self.scales:
                encoding, rounded = _rescaled(start, encoding, rounded, half_gradient, product)
            grid = replace(start, encoding=encoding).grid()
            rounded = coordinate_descent(weight, rounded, grid, state.error, passes=1, half_gradient=half_gradient)
            if torch.equal(rounded, present) and encoding.equals(present_encoding):
                break
        return start.updated(weight=rounded, encoding=encoding)


def _rescaled(
    state: LayerState, encoding: Encoding, rounded: Tensor, half_gradient: Tensor, product: Tensor | None
) -> tuple[Encoding, Tensor]:
    """The encoding with the best scales for the present codes, and the weights of these codes.

    Args:
        state: of the layer.
        encoding: the present one.
        rounded: the present weights.
        half_gradient: of the present weights; becomes that of the result.
        product: of the float weights with the Gram matrix.
    """
    scale_index = state.scale_index()
    block = columns_per_scale(scale_index)
    if encoding.spec.scale_format is not None or block is None:
        return encoding, rounded
    codes = rounded / replace(state, encoding=encoding).grid().scale
    if not isinstance(encoding.spec.dtype, FloatDtype):
        codes = codes.round()
    scales = code_scales(
        state.to_gemm(state.float_weight), codes, encoding.scale.flatten(), scale_index, state.error, block=block,
        half_gradient=half_gradient, product=product,
    )
    changed = replace(encoding, scale=scales.reshape(encoding.scale.shape))
    grid = replace(state, encoding=changed).grid()
    return changed, grid.nearest(codes * grid.scale)
