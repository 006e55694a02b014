"""Sequential MSE on Gram matrices: for each scale the candidate with the least error of the layer's output.

``search_scales`` decides every scale by itself; ``refine_jointly`` then lowers the error of the whole output by
block-coordinate descent over the blocks of columns. The error of a candidate costs the same however many samples the
Gram matrix was summed over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qtk.algorithms.output_error import CandidateError, DiagonalError, OutputError
from qtk.core.dtypes import FloatDtype
from qtk.core.granularity import WHOLE, PerChannel
from qtk.core.spec import QuantSpec
from qtk.errors import SpecError
from qtk.ops.candidate_errors import candidate_errors
from qtk.ops.simulate import simulate

CONTENDERS = 6
"""Candidates of a scale with the least errors of uncorrelated columns, whose errors are then computed."""
AT_ONCE = 1 << 19
"""Weights whose errors are computed together, at most: as many as fit the CPU cache."""
MANY_COLUMNS = 128
"""Columns of a block from which on the errors of all candidates cost more than to pick ``CONTENDERS``."""

ALL = slice(None)


@dataclass(frozen=True, slots=True, eq=False)
class ScaleCandidates:
    """Candidates for every scale of a layer, and the error to compare them by.

    Args:
        error: of the output, for each block of columns separately.
        target: the weights of the float model.
        weight: the weights to round, which an earlier method may have changed.
        scale_index: index of the scale of each output and block; a shared scale is chosen by the sum of the errors.
        spec: spec of the weight.
        scales: the candidates, the present scales last.
        zero_points: zero points of the candidates, ``None`` if symmetric.

    Shape: ``target`` and ``weight`` [groups, blocks, outputs, block]; ``scale_index`` int64 [groups, blocks, outputs];
    ``scales`` float32 and ``zero_points`` int32 [candidates, scales].

    Raises: SpecError if ``scale_index`` and ``error`` do not have the same blocks.
    """

    error: CandidateError
    target: Tensor
    weight: Tensor
    scale_index: Tensor
    spec: QuantSpec
    scales: Tensor
    zero_points: Tensor | None = None

    def __post_init__(self) -> None:
        blocks = self.error.blocks
        if self.scale_index.shape[1] != blocks:
            raise SpecError(f"{self.scale_index.shape[1]} scales along the columns need the moments of as many blocks; "
                            f"there are {blocks}; gather them in blocks as long as the blocks of the scales")

    def every(self, candidate: int) -> Tensor:
        """The index ``candidate`` for all scales. Shape: int64 [scales]."""
        return torch.full(self.scales.shape[1:], candidate, dtype=torch.int64, device=self.scales.device)

    def rounded(self, candidate: Tensor, blocks: slice = ALL, outputs: slice = ALL) -> Tensor:
        """Weights rounded with one candidate each. Shape: int64 [scales]; result [groups, blocks, outputs, block]."""
        weight, index = self.weight[:, blocks, outputs], self.scale_index[:, blocks, outputs].flatten()
        scale = self.scales.gather(0, candidate[None])[0][index]
        zero_point = None if self.zero_points is None else self.zero_points.gather(0, candidate[None])[0][index]
        spec = replace(self.spec, granularity=PerChannel(0), scale_format=None)
        rows = weight.reshape(len(index), -1).to(torch.float32)
        return simulate(rows, spec, scale, zero_point).to(weight.dtype).reshape(weight.shape)

    def errors(self, error: CandidateError | DiagonalError, candidates: Sequence[Tensor] | Tensor) -> Tensor:
        """Errors of candidates, summed over all blocks that share a scale. Shape: both [candidates, scales]."""
        total = self.target.new_zeros(len(candidates), self.scales.shape[1])
        for blocks, outputs in self._pieces():
            target, index = self.target[:, blocks, outputs], self.scale_index[:, blocks, outputs].flatten()
            piece_error = error.select(blocks, outputs)
            for row, candidate in enumerate(candidates):
                output_error = piece_error.of(target - self.rounded(candidate, blocks, outputs))
                total[row].index_add_(0, index, output_error.flatten())
        return total

    def uncorrelated_errors(self, error: OutputError) -> Tensor:
        """Errors of all candidates as if columns were uncorrelated. Shape: [candidates, scales]."""
        if isinstance(self.spec.dtype, FloatDtype):
            return self.errors(error.of_uncorrelated(), [self.every(index) for index in range(len(self.scales))])
        diagonal, index = error.of_uncorrelated().diagonal.flatten(0, 1), self.scale_index.flatten()
        errors = candidate_errors(
            self.weight.flatten(0, 1), self.scales[:, index],
            None if self.zero_points is None else self.zero_points[:, index], (1, 1, WHOLE), int(self.spec.qmin),
            int(self.spec.qmax), importance=diagonal)
        return errors.new_zeros(self.scales.shape).index_add_(1, index, errors)

    def of_block(self, block: int) -> tuple[Tensor, ScaleCandidates]:
        """The scales of one block of columns, int64 [scales of the block], and the candidates for them."""
        here = slice(block, block + 1)
        scales, index = torch.unique(self.scale_index[:, here], return_inverse=True)
        zero_points = None if self.zero_points is None else self.zero_points[:, scales]
        return scales, replace(
            self, error=self.error.select(here, ALL), target=self.target[:, here], weight=self.weight[:, here],
            scale_index=index, scales=self.scales[:, scales], zero_points=zero_points,
        )

    def _pieces(self) -> Iterator[tuple[slice, slice]]:
        """Slices of blocks, or of outputs if there is one block, with about ``AT_ONCE`` weights each."""
        groups, blocks, outputs, block = self.weight.shape
        if blocks > 1:
            length = max(1, AT_ONCE // (groups * outputs * block))
            yield from ((slice(begin, begin + length), ALL) for begin in range(0, blocks, length))
        else:
            length = max(1, AT_ONCE // (groups * block))
            yield from ((ALL, slice(begin, begin + length)) for begin in range(0, outputs, length))


@dataclass(frozen=True, slots=True, eq=False)
class SearchResult:
    """The best candidate of each scale, int64, its error, and the error of the present scale, without the constant.

    Shape: [scales], each.
    """

    candidate: Tensor
    error: Tensor
    present_error: Tensor


def search_scales(candidates: ScaleCandidates, *, exact: bool = False) -> SearchResult:
    """For each scale the candidate of least error; the first of equal ones.

    Args:
        candidates: of every scale.
        exact: compute the error of every candidate. Otherwise the errors of uncorrelated columns pick ``CONTENDERS`` of
            them, whose errors decide; in blocks of few columns all are computed in any case.
    """
    tried = torch.arange(len(candidates.scales), device=candidates.scales.device)[:, None].expand_as(candidates.scales)
    is_cheaper = len(tried) > CONTENDERS + 1 and candidates.weight.shape[-1] >= MANY_COLUMNS
    if not exact and is_cheaper and isinstance(candidates.error, OutputError):
        uncorrelated = candidates.uncorrelated_errors(candidates.error)[:-1]
        contenders = uncorrelated.topk(CONTENDERS, 0, largest=False).indices.sort(0).values
        tried = torch.cat([contenders, tried[-1:]])
    errors = candidates.errors(candidates.error, tried)
    least = errors.min(0)
    return SearchResult(tried.gather(0, least.indices[None])[0], least.values, errors[-1])


def refine_jointly(
    candidates: ScaleCandidates, whole_error: OutputError, start: Tensor, *, sweeps: int = 4
) -> Tensor:
    """Block-coordinate descent: block after block takes the candidate best for the whole output, given the others.

    No sweep raises the error.

    Args:
        candidates: of every scale.
        whole_error: the error of the whole output, of one block.
        start: the candidate each scale starts from.
        sweeps: over all blocks, at most; it ends when a sweep changes nothing.

    Shape: ``start`` and result int64 [scales].
    """
    current = start.clone()
    groups, blocks, outputs, block = candidates.weight.shape
    change = candidates.target - candidates.rounded(current)
    half_gradient = whole_error.half_gradient(change.transpose(1, 2).reshape(groups, 1, outputs, blocks * block))
    by_block = [candidates.of_block(index) for index in range(blocks)]
    for _ in range(sweeps):
        before = current.clone()
        for index, (scales, of_block) in enumerate(by_block):
            here, columns = slice(index, index + 1), slice(index * block, (index + 1) * block)
            error = OutputError(whole_error.gram[:, :, columns, columns], half_gradient[..., columns])
            error_changes = torch.zeros_like(of_block.scales, dtype=half_gradient.dtype)
            for candidate, error_change in enumerate(error_changes):
                move = of_block.target - of_block.rounded(of_block.every(candidate)) - change[:, here]
                error_change.index_add_(0, of_block.scale_index.flatten(), error.of(move).flatten())
            best = error_changes.min(0)
            current[scales] = torch.where(best.values < 0, best.indices, current[scales])
            move = of_block.target - of_block.rounded(current[scales]) - change[:, here]
            half_gradient += move @ whole_error.gram[:, :, columns]
            change[:, here] += move
        if torch.equal(current, before):
            break
    return current
