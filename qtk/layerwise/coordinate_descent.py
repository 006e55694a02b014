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
from qtk.moments.required_statistics import RequiredStatistics
from qtk.numerics.scale_formats import rounded_like
from qtk.public import public

MOST_PASSES = 1000
REHEARSED = 2
"""Passes that tell which prior is best."""
SCALES_EVERY = 2
"""Scales move before every second pass, and after one that changes nothing: before each they cost more for nothing."""


@public
@dataclass(frozen=True, slots=True)
class CoordinateDescent:
    """Coordinate descent on rounding and scales (QuantEase, arXiv 2309.01885), which no pass can make worse.

    It starts from the weights that an earlier method has rounded, otherwise from GPTQ's.

    Args:
        passes: over all columns, at most; it ends when a pass changes nothing. A prior
            (``qtk.layerwise.candidates``) is chosen by two.
        scales: before every second pass, give each scale its best value for the present codes; scales stored in few
            bits, and scales of scattered columns, stay unchanged.

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
        weight = state.to_gemm(state.float_weight)
        descent = Descent.begin(weight, state.to_gemm(start.simulated_weight()), state.error)
        scales, encoding = _Scales.of(start, weight) if self.scales else None, start.encoding
        passes = min(self.passes, REHEARSED) if state.rehearses else self.passes
        is_settled = False
        for turn in range(passes):
            present, moves_scales = encoding, scales is not None and (is_settled or turn % SCALES_EVERY == 0)
            if scales is not None and moves_scales:
                encoding = scales.moved(replace(start, encoding=encoding), descent)
            is_settled = not bool(descent.run_pass(replace(start, encoding=encoding).grid()).any())
            if is_settled and (scales is None or (moves_scales and encoding.equals(present))):
                break
        return start.updated(weight=descent.rounded, encoding=encoding)


@dataclass(frozen=True, slots=True, eq=False)
class _Scales:
    """What the search for scales needs in every pass.

    Args:
        weight: the float weights.
        index: of every weight's scale.
        block: number of consecutive columns that share one.
        product: of the float weights with the Gram matrix, where all columns share one scale.

    Shape: all but ``block`` [groups, outputs, columns].
    """

    weight: Tensor
    index: Tensor
    block: int
    product: Tensor | None

    @classmethod
    def of(cls, state: LayerState, weight: Tensor) -> _Scales | None:
        """``None`` where scales stay what they are."""
        index = state.scale_index()
        block = columns_per_scale(index)
        if state.encoding.spec.scale_format is not None or block is None:
            return None
        return cls(weight, index, block, weight @ state.error.gram[:, 0] if block == weight.shape[2] else None)

    def moved(self, state: LayerState, descent: Descent) -> Encoding:
        """The encoding with the best scales for the present codes, to which the descent moves.

        Args:
            state: with the present encoding.
            descent: at weights of this encoding.
        """
        encoding = state.encoding
        codes = descent.rounded / state.grid().scale
        if not isinstance(encoding.spec.dtype, FloatDtype):
            codes = codes.round()
        scales = code_scales(
            codes, encoding.scale.flatten(), self.index, state.error, descent.half_gradient, block=self.block,
            product=self.product,
        )
        changed = replace(encoding, scale=rounded_like(scales.reshape(encoding.scale.shape), encoding.scale))
        grid = replace(state, encoding=changed).grid()
        descent.rounded.copy_(grid.nearest(codes * grid.scale))
        torch.sub(self.weight, descent.rounded, out=descent.change)
        return changed
