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
"""Of choosing the scales for what was rounded with the scales before; one tells which prior is best."""


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
            rounded = feedback.rounded(state.grid(), self.columns_at_once).weight
            return state.updated(weight=feedback.in_place(rounded))
        search = _ScaleSearch.of(state, index, feedback.in_place(feedback.factor.power))
        encoding = search.half_spans()
        best = feedback.rounded(replace(state, encoding=encoding).grid(), self.columns_at_once)
        weight, target, lost = best.weight, best.weight + best.missing, best.lost
        rounds = 1 if state.rehearses else ROUNDS
        for turn in range(rounds):
            other = search.of_targets(feedback.in_place(target))
            found = feedback.rounded(replace(state, encoding=other).grid(), self.columns_at_once)
            is_better = (found.lost < lost)[..., None]
            weight, lost = torch.where(is_better, found.weight, weight), torch.minimum(found.lost, lost)
            if turn + 1 < rounds:
                target = torch.where(is_better, found.weight + found.missing, target)
            encoding = search.mixed(encoding, other, is_better)
        return state.updated(weight=feedback.in_place(weight), encoding=encoding)


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


@dataclass(frozen=True, slots=True, eq=False)
class _ScaleSearch:
    """The search for the scales of a layer's weights among ranges that follow from the weights alone.

    So the last bits of statistics do not reach the scales.

    Args:
        state: of the layer.
        index: of the scale of each output and block of columns.
        importance: what the squared rounding error of each weight counts.
        extremes: of the weights of each scale.
        tried: scales and zero points.

    Shape: ``index`` int64 [groups, outputs, blocks]; ``importance`` broadcastable to the weights in GEMM layout;
    ``extremes`` float64 [scales]; ``tried`` [candidates, scales].
    """

    state: LayerState
    index: Tensor
    importance: Tensor
    extremes: tuple[Tensor, Tensor]
    tried: tuple[Tensor, Tensor | None]

    @classmethod
    def of(cls, state: LayerState, index: Tensor, power: Tensor) -> _ScaleSearch:
        """Shape: ``power`` of the columns, [groups, 1, columns]."""
        spec = state.encoding.spec
        low, high = (bound.to(torch.float64)
                     for bound in state.to_gemm(state.unrounded).reshape(index.numel(), -1).aminmax(dim=1))
        widest = WIDEST if spec.symmetric else WIDEST_ASYMMETRIC
        scales, zero_points = narrower_ranges(widest * low, widest * high, spec, STEPS)
        importance = power if state.zeros is None else power * ~weight_to_gemm(state.zeros, state.geometry)
        return cls(state, index, importance, (low, high), (rounded_like(scales, state.encoding.scale), zero_points))

    def half_spans(self) -> Encoding:
        """The encoding whose codes span twice the largest magnitude, or the range of the weights with a zero point."""
        spec, (low, high) = self.state.encoding.spec, self.extremes
        if spec.symmetric:
            high = torch.maximum(high, -low) * (2 * spec.qmax / (spec.qmax - spec.qmin))
            low = -high
        scale, zero_point = covering_range(low, high, spec)
        return _replaced(self.state.encoding, self.index, rounded_like(scale, self.state.encoding.scale), zero_point)

    def of_targets(self, target: Tensor) -> Encoding:
        """The encoding with which rounding the targets costs least. Shape: ``target`` as the weights."""
        spec, (scales, zero_points) = self.state.encoding.spec, self.tried
        block_size = 1, 1, target.shape[2] // self.index.shape[2]
        errors = candidate_errors(target, scales, zero_points, block_size, int(spec.qmin), int(spec.qmax),
                                  importance=self.importance)
        best = errors.argmin(0, keepdim=True)
        return _replaced(self.state.encoding, self.index, scales.gather(0, best)[0],
                         None if zero_points is None else zero_points.gather(0, best)[0])

    def mixed(self, encoding: Encoding, other: Encoding, takes_other: Tensor) -> Encoding:
        """The encoding with the scales of some outputs of another. Shape: ``takes_other`` bool [groups, outputs, 1]."""
        chosen, zero_point = self.index[takes_other.expand_as(self.index)], other.zero_point
        return _replaced(encoding, chosen, other.scale.flatten()[chosen],
                         None if zero_point is None else zero_point.flatten()[chosen])


def _replaced(encoding: Encoding, index: Tensor, scale: Tensor, zero_point: Tensor | None) -> Encoding:
    """The encoding with other scales at ``index``."""

    def in_place(present: Tensor, found: Tensor) -> Tensor:
        return present.flatten().index_copy(0, index.flatten(), found).reshape(present.shape)

    present = encoding.zero_point
    return replace(encoding, scale=in_place(encoding.scale, scale),
                   zero_point=None if present is None or zero_point is None else in_place(present, zero_point))
