"""GPTQ on a layer: rounds its columns in order and propagates each error through the inverse Hessian."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from qtk.algorithms.gptq import Feedback
from qtk.calibrators.weight_mse import narrower_ranges
from qtk.core.dtypes import FloatDtype
from qtk.core.encoding import Encoding
from qtk.core.spec import QuantSpec
from qtk.errors import CalibrationError
from qtk.layerwise.layer_state import LayerState, columns_per_scale
from qtk.moments.required_statistics import RequiredStatistics
from qtk.numerics.im2col import weight_to_gemm
from qtk.numerics.ranges import covering_range
from qtk.numerics.scale_formats import rounded_like
from qtk.ops.candidate_errors import candidate_errors
from qtk.public import public

MOST_CODES = 16
"""Codes of weights whose scales are chosen anew, at most."""
STEPS = 12
"""Ranges tried for each scale."""
WIDEST, WIDEST_ASYMMETRIC = 1.4, 1.15
"""The widest of them over the range of the weights, which errors of other weights widen; symmetric codes of 2 bits have
one above 0."""
ROUNDS = 2
"""Of choosing the scales for what was rounded with the scales before."""


@public
@dataclass(frozen=True, slots=True)
class Gptq:
    """GPTQ (arXiv 2210.17323), for weights of at most 4 bits with scales of its own.

    A scale that is found for rounding alone does not suit weights to which the errors of others were added. So each is
    chosen, twice, by what rounding them costs an output, each error counted as far as columns still to come cannot
    take it up; an output keeps the round of lower error. It begins with codes that span twice the largest magnitude.
    Scales that 16-bit floats hold (``qtk.round_scales``) become such again. Frozen encodings, scales that rows share,
    scales stored in few bits and scales that an earlier method of the same call has chosen stay what they are.

    Where the quantized model's input X̂ differs from the float model's X, it rounds the least-squares weights
    ``w + H⁻¹ Eᵀ w`` (damped H), whose output on X̂ is closest to the float output, not w (arXiv 2504.02692).

    Args:
        damping: added to the diagonal of the Hessian, as a multiple of its mean.
        act_order: round the columns with the largest inputs first.
        columns_at_once: columns whose errors are propagated to the rest together; does not change the result.
        scales: whether scales of weights of at most 4 bits are chosen anew.

    Raises: CalibrationError if ``damping`` is not above 0 or ``columns_at_once`` below 1.
    """

    needs_bias: ClassVar[bool] = False
    searches_scale: ClassVar[bool] = False

    damping: float = 0.01
    act_order: bool = True
    columns_at_once: int = 128
    scales: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.damping < math.inf or self.columns_at_once < 1:
            raise CalibrationError(f"GPTQ needs a finite damping > 0 and columns_at_once ≥ 1, got {self.damping} and "
                                   f"{self.columns_at_once}")

    def min_rows(self, columns: int) -> int:
        return 2 * columns

    def refuses(self, spec: QuantSpec) -> str | None:
        return None

    def required_statistics(self, block: int | None) -> RequiredStatistics:
        return RequiredStatistics()

    def apply(self, state: LayerState) -> LayerState:
        """Raises: CalibrationError if the damped Hessian has no inverse."""
        error = state.error
        feedback = Feedback.of(state.to_gemm(state.float_weight), error.factor(self.damping, self.act_order),
                               None if error.linear is None else error.linear[:, 0])
        index = _own_scales(state) if self.scales else None
        if index is None:
            return state.updated(weight=feedback.rounded(state.grid(), self.columns_at_once)[0])
        encoding = _half_spans(state, index)
        rounded, missing = feedback.rounded(replace(state, encoding=encoding).grid(), self.columns_at_once)
        target, power, least = feedback.targets(rounded, missing)
        for _ in range(ROUNDS):
            other = _of_targets(state, index, target, power)
            found, missing = feedback.rounded(replace(state, encoding=other).grid(), self.columns_at_once)
            next_target, _, lost = feedback.targets(found, missing)
            is_better = (lost < least)[..., None]
            rounded, least = torch.where(is_better, found, rounded), torch.minimum(lost, least)
            target = torch.where(is_better, next_target, target)
            encoding = _mixed(encoding, other, index, is_better.expand_as(index))
        return state.updated(weight=rounded, encoding=encoding)


def _own_scales(state: LayerState) -> Tensor | None:
    """Index of the scale of each output and block of columns; ``None`` where the scales stay what they are.

    Shape: int64 [groups, outputs, blocks].
    """
    spec = state.encoding.spec
    if not state.moves_scales or isinstance(spec.dtype, FloatDtype) or spec.qmax - spec.qmin >= MOST_CODES:
        return None
    index = state.scale_index()
    block = columns_per_scale(index)
    if spec.scale_format is not None or block is None:
        return None
    index = index[..., ::block].to(torch.int64)
    return index if index.numel() == state.encoding.scale.numel() else None


def _half_spans(state: LayerState, index: Tensor) -> Encoding:
    """The encoding whose codes span twice the largest magnitude, or the range of the weights with a zero point."""
    spec = state.encoding.spec
    low, high = state.to_gemm(state.unrounded).reshape(index.numel(), -1).to(torch.float64).aminmax(dim=1)
    if spec.symmetric:
        high = torch.maximum(high, -low) * (2 * spec.qmax / (spec.qmax - spec.qmin))
        low = -high
    scale, zero_point = covering_range(low, high, spec)
    return _replaced(state.encoding, index, rounded_like(scale, state.encoding.scale), zero_point)


def _of_targets(state: LayerState, index: Tensor, target: Tensor, power: Tensor) -> Encoding:
    """The encoding with which rounding the targets costs least.

    The ranges tried follow from the weights alone, so that the last bits of statistics do not reach the scales.
    """
    spec, shape = state.encoding.spec, (index.numel(), -1)
    values, weights = target.reshape(shape), power.reshape(shape)
    if state.zeros is not None:
        weights = weights * ~weight_to_gemm(state.zeros, state.geometry).reshape(shape)
    low, high = state.to_gemm(state.unrounded).reshape(shape).to(torch.float64).aminmax(dim=1)
    widest = WIDEST if spec.symmetric else WIDEST_ASYMMETRIC
    scales, zero_points = narrower_ranges(widest * low, widest * high, spec, STEPS)
    scales = rounded_like(scales, state.encoding.scale)
    errors = candidate_errors(values, scales, zero_points, (1, -1), int(spec.qmin), int(spec.qmax), importance=weights)
    best = errors.argmin(0, keepdim=True)
    return _replaced(state.encoding, index, scales.gather(0, best)[0],
                     None if zero_points is None else zero_points.gather(0, best)[0])


def _replaced(encoding: Encoding, index: Tensor, scale: Tensor, zero_point: Tensor | None) -> Encoding:
    """The encoding with other scales at ``index``."""

    def in_place(present: Tensor, found: Tensor) -> Tensor:
        return present.flatten().index_copy(0, index.flatten(), found).reshape(present.shape)

    present = encoding.zero_point
    return replace(encoding, scale=in_place(encoding.scale, scale),
                   zero_point=None if present is None or zero_point is None else in_place(present, zero_point))


def _mixed(encoding: Encoding, other: Encoding, index: Tensor, takes_other: Tensor) -> Encoding:
    """The encoding with some scales of another."""
    chosen, zero_point = index[takes_other], other.zero_point
    return _replaced(encoding, chosen, other.scale.flatten()[chosen],
                     None if zero_point is None else zero_point.flatten()[chosen])
