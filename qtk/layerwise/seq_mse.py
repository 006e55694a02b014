"""Sequential MSE on a layer: searches the scales of its weight with the least error of its output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from qtk.algorithms.output_error import AbsoluteError, CandidateError, LogError, OutputError, in_blocks
from qtk.algorithms.seq_mse import ScaleCandidates, refine_jointly, search_scales
from qtk.core.bounds import check_count
from qtk.core.encoding import Encoding
from qtk.core.spec import QuantSpec
from qtk.errors import CalibrationError
from qtk.layerwise.layer_state import LayerState, columns_per_scale
from qtk.moments.required_statistics import RequiredStatistics
from qtk.numerics.ranges import choose_range
from qtk.numerics.scale_formats import candidates, rounded_like
from qtk.public import public

MOST_CANDIDATES = 10_000
LOSSES = ("mse", "sqnr", "l1")
SAMPLE_ROWS = 1024
"""Rows of input on which absolute errors are measured."""


@public
@dataclass(frozen=True, slots=True)
class SeqMse:
    """Minimises the output error of a layer over ``i / num_candidates`` times the present range of each scale.

    Scales stored in few bits (MX, NVFP4, LPBQ) are searched among scales that can be stored.

    Args:
        num_candidates: ranges tried, at most 10,000.
        refine: try as many once more, around the best.
        joint: then block-coordinate descent over the blocks of a weight quantized in blocks, on the error of the whole
            output.
        exact: compute the error of every candidate; otherwise estimates pick candidates whose errors are computed.
        loss: ``mse``; ``sqnr``, which differs where several outputs share a scale: each counts by its own power; or
            ``l1``, absolute errors on a sample of rows.

    Raises: CalibrationError if a setting is out of range, or ``joint`` is set with a loss other than ``mse``.
    """

    needs_bias: ClassVar[bool] = False
    searches_scale: ClassVar[bool] = True

    num_candidates: int = 20
    refine: bool = False
    joint: bool = False
    exact: bool = False
    loss: str = "mse"

    def __post_init__(self) -> None:
        check_count("num_candidates of seq_mse", self.num_candidates, MOST_CANDIDATES)
        if self.loss not in LOSSES:
            raise CalibrationError(f"the loss of seq_mse is one of {', '.join(LOSSES)}, got {self.loss!r}")
        if self.joint and self.loss != "mse":
            raise CalibrationError(f"joint needs loss='mse', whose errors of blocks add up; got loss={self.loss!r}")

    def min_rows(self, columns: int) -> int:
        return 0

    def refuses(self, spec: QuantSpec) -> str | None:
        return None

    def required_statistics(self, block: int | None) -> RequiredStatistics:
        return RequiredStatistics(
            None if self.joint else block, difference=self.loss == "sqnr",
            sample_rows=SAMPLE_ROWS if self.loss == "l1" else 0,
        )

    def apply(self, state: LayerState) -> LayerState:
        """Raises: CalibrationError if the scales cut the columns of the layer unevenly."""
        search = _RangeSearch(state, self.loss)
        shape, device = state.encoding.scale.shape, state.weight.device
        coarse = torch.arange(1, self.num_candidates + 1, device=device) / self.num_candidates
        fractions = coarse.reshape(-1, *(1 for _ in shape)).expand(-1, *shape)
        best = coarse_best = search.best(fractions, exact=self.exact)
        if self.refine and state.encoding.spec.scale_format is None:
            offsets = torch.linspace(-1, 1, self.num_candidates + 2, device=device)[1:-1]
            offsets = torch.cat([offsets, offsets.new_zeros(1)]).reshape(-1, *(1 for _ in shape))
            fine = coarse[coarse_best.candidate] + offsets / self.num_candidates
            fractions = torch.cat([fine, torch.ones_like(fine[:1])])
            best = search.best(fractions, exact=self.exact)
        if self.joint and search.has_cross_blocks:
            return state.updated(encoding=search.refined_jointly(fractions, best.candidate))
        # errors of blocks add up to the error measured only if there are no cross terms of blocks
        is_output_error = self.loss == "mse" and not search.has_cross_blocks
        return state.updated(
            encoding=best.encoding, loss=(coarse_best.present_error, best.error) if is_output_error else None
        )


@dataclass(frozen=True, slots=True, eq=False)
class _BestRanges:
    """The candidate of every scale, in the shape of the scale; its encoding and error, and the present error."""

    candidate: Tensor
    encoding: Encoding
    error: float
    present_error: float


class _RangeSearch:
    """A layer with its columns ordered by blocks that share a scale, and the error to compare ranges by."""

    def __init__(self, state: LayerState, loss: str) -> None:
        scale_index = state.scale_index()
        columns = scale_index.shape[-1]
        block = columns_per_scale(scale_index)
        order: Tensor | slice = slice(None)
        if block is None:  # scattered blocks: channels of a convolution, one position of its kernel
            order = scale_index[0, 0].argsort(stable=True)
            block = columns_per_scale(scale_index[..., order])
        if block is None:
            raise CalibrationError(f"{state.encoding.spec} cuts the columns of the layer unevenly")
        linear = None if state.error.linear is None else state.error.linear[..., order]
        gram = state.error.gram if isinstance(order, slice) else state.error.gram[..., order, :][..., order]
        self._encoding = state.encoding
        self._whole_error = OutputError(gram, linear)
        self._block_error = self._whole_error.diagonal_blocks(columns // block)
        self._scale_index = in_blocks(scale_index[..., order], columns // block)[..., 0].to(torch.int64)
        self._target = in_blocks(state.to_gemm(state.float_weight)[..., order], columns // block)
        self._weight = self._target
        if state.weight is not state.float_weight:
            self._weight = in_blocks(state.to_gemm(state.weight)[..., order], columns // block)
        self._error: CandidateError = self._block_error
        if loss == "l1":
            rows, input_error = (
                in_blocks(sample.to(state.dtype)[..., order], columns // block) for sample in state.moments.sample
            )
            self._error = AbsoluteError(rows, input_error @ self._target.mT)
        elif loss == "sqnr":
            self._error = self._log_error(state, order)

    @property
    def has_cross_blocks(self) -> bool:
        """Says whether the Gram matrix holds products of columns of different blocks."""
        return self._block_error is not self._whole_error

    def best(self, fraction: Tensor, *, exact: bool) -> _BestRanges:
        """For every scale the fraction of the present range with the least error.

        Shape: ``fraction`` [candidates, *scale.shape]; the last is 1.
        """
        scale_candidates = self._candidates(fraction)
        result = search_scales(scale_candidates, exact=exact)
        error, present_error = (float(each.sum(dtype=torch.float64)) for each in (result.error, result.present_error))
        encoding = self._encoding_of(scale_candidates, result.candidate)
        return _BestRanges(result.candidate.reshape(encoding.scale.shape), encoding, error, present_error)

    def refined_jointly(self, fraction: Tensor, start: Tensor) -> Encoding:
        """Block-coordinate descent from ``start`` or from the present ranges, whichever is better."""
        scale_candidates = self._candidates(fraction)
        starts = start.flatten(), torch.full_like(start.flatten(), len(scale_candidates.scales) - 1)
        errors = [
            float(self._whole_error.of(self._change(scale_candidates, each)).sum(dtype=torch.float64))
            for each in starts
        ]
        better_start = starts[errors.index(min(errors))]
        return self._encoding_of(scale_candidates, refine_jointly(scale_candidates, self._whole_error, better_start))

    def _candidates(self, fraction: Tensor) -> ScaleCandidates:
        scales, zero_points = (
            None if table is None else table.flatten(1) for table in _candidate_tables(self._encoding, fraction)
        )
        assert scales is not None
        return ScaleCandidates(
            self._error, self._target, self._weight, self._scale_index, self._encoding.spec, scales, zero_points
        )

    def _encoding_of(self, scale_candidates: ScaleCandidates, candidate: Tensor) -> Encoding:
        scale, zero_point = (
            None if table is None else table.gather(0, candidate[None]).reshape(self._encoding.scale.shape)
            for table in (scale_candidates.scales, scale_candidates.zero_points)
        )
        assert scale is not None
        return Encoding(self._encoding.spec, rounded_like(scale, self._encoding.scale), zero_point)

    def _log_error(self, state: LayerState, order: Tensor | slice) -> LogError:
        """With the squares of (X - X̂) w and of X w, which do not depend on the candidate."""
        signal = OutputError(self._block_error.gram).of(self._target)
        difference = state.moments.difference
        if difference is None:
            return LogError(self._block_error, torch.zeros_like(signal), signal)
        ordered = difference if isinstance(order, slice) else difference[..., order, :][..., order]
        blocks = OutputError(ordered.to(state.dtype)).diagonal_blocks(self._block_error.blocks)
        constant = blocks.of(self._target)
        return LogError(self._block_error, constant, self._block_error.of(self._target) + constant)

    def _change(self, scale_candidates: ScaleCandidates, candidate: Tensor) -> Tensor:
        """The change of the weights, as one block."""
        change = self._target - scale_candidates.rounded(candidate)
        groups, blocks, outputs, block = change.shape
        return change.transpose(1, 2).reshape(groups, 1, outputs, blocks * block)


def _candidate_tables(encoding: Encoding, fraction: Tensor) -> tuple[Tensor, Tensor | None]:
    """Scales and zero points of the candidates. Shape: [candidates, *scale.shape], both."""
    if encoding.zero_point is not None:
        return choose_range(encoding.minimum * fraction, encoding.maximum * fraction, encoding.spec)
    return candidates(encoding.scale, fraction, encoding.spec), None
