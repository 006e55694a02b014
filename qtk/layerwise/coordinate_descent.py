"""Coordinate descent on a layer: moves one weight after the other to its best grid point, and the scales with them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from qtk.algorithms.code_scales import code_scales
from qtk.algorithms.coordinate_descent import Descent
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
        weight, rounded = (
            state.to_gemm(each).contiguous() for each in (state.float_weight, start.simulated_weight())
        )
        change = weight - rounded
        descent = Descent(state.error, change, rounded, state.error.half_gradient(change[:, None])[:, 0])
        product, encoding = weight @ state.error.gram[:, 0] if self.scales else None, start.encoding
        for _ in range(self.passes):
            present = encoding
            if product is not None:
                encoding = _rescaled(replace(start, encoding=encoding), descent, weight, product)
            is_lower = descent.run_pass(replace(start, encoding=encoding).grid())
            if not bool(is_lower.any()) and encoding.equals(present):
                break
        return start.updated(weight=descent.rounded, encoding=encoding)


def _rescaled(state: LayerState, descent: Descent, weight: Tensor, product: Tensor) -> Encoding:
    """The encoding with the best scales for the present codes, to which the descent moves.

    Args:
        state: with the present encoding.
        descent: at weights of this encoding.
        weight: the float weights.
        product: of the float weights with the Gram matrix.
    """
    encoding, scale_index = state.encoding, state.scale_index()
    block = columns_per_scale(scale_index)
    if encoding.spec.scale_format is not None or block is None:
        return encoding
    codes = descent.rounded / state.grid().scale
    if not isinstance(encoding.spec.dtype, FloatDtype):
        codes = codes.round()
    scales = code_scales(
        codes, encoding.scale.flatten(), scale_index, state.error, descent.half_gradient, block=block, product=product
    )
    changed = replace(encoding, scale=scales.reshape(encoding.scale.shape))
    grid = replace(state, encoding=changed).grid()
    descent.rounded.copy_(grid.nearest(codes * grid.scale))
    torch.sub(weight, descent.rounded, out=descent.change)
    return changed
