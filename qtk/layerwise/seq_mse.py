"""Sequential MSE: the scales of a weight with which the output of its layer changes least."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qtk.algorithms.output_error import AbsoluteError, Error, LogError, OutputError, in_blocks
from qtk.algorithms.seq_mse import Search, refine_jointly
from qtk.core.encoding import Encoding
from qtk.core.spec import QuantSpec
from qtk.errors import CalibrationError
from qtk.layerwise.layer_state import LayerState, block_of
from qtk.layerwise.second_moments import Wanted
from qtk.numerics.ranges import choose_range
from qtk.numerics.scale_formats import candidates

LOSSES = ("mse", "sqnr", "l1")
SAMPLED = 1024
"""Rows that absolute errors are counted on."""


@dataclass(frozen=True, slots=True)
class SeqMse:
    """Of the ranges ``i / num_candidates`` times the present one, takes for each scale the one of least error.

    Scales stored in few bits (MX, NVFP4, LPBQ) are searched among those that can be stored.

    Args:
        num_candidates: ranges tried.
        refine: try as many once more, around the winner.
        joint: let blocks make up for each other: judged by the whole output, one after the other.
        exact: compute the error of every candidate; otherwise estimates choose those that are.
        loss: ``mse``; ``sqnr``, which differs where several outputs share a scale: each counts by its own power; or
            ``l1``, absolute errors of a sample of rows.
    """

    num_candidates: int = 20
    refine: bool = False
    joint: bool = False
    exact: bool = False
    loss: str = "mse"

    def __post_init__(self) -> None:
        if self.num_candidates < 1:
            raise CalibrationError(f"seq_mse needs num_candidates ≥ 1, got {self.num_candidates}")
        if self.loss not in LOSSES:
            raise CalibrationError(f"the loss of seq_mse is one of {', '.join(LOSSES)}, got {self.loss!r}")
        if self.joint and self.loss != "mse":
            raise CalibrationError(f"blocks make up for each other in squares: joint needs loss='mse', not {self.loss}")

    def wants(self, block: int | None) -> Wanted:
        return Wanted(
            None if self.joint else block, difference=self.loss == "sqnr", sample=SAMPLED if self.loss == "l1" else 0
        )

    def refuses(self, spec: QuantSpec) -> str:
        return ""

    def apply(self, problem: LayerState) -> LayerState:
        layer = _Layer(problem, self.loss)
        shape, device = problem.encoding.scale.shape, problem.weight.device
        step = torch.arange(1, self.num_candidates + 1, device=device) / self.num_candidates
        fractions = step.reshape(-1, *(1 for _ in shape)).expand(-1, *shape)
        found = start = layer.best(fractions, exact=self.exact)
        if self.refine and problem.encoding.spec.scale_format is None:
            around = torch.linspace(-1, 1, self.num_candidates + 2, device=device)[1:-1]
            around = torch.cat([around, around.new_zeros(1)]).reshape(-1, *(1 for _ in shape))
            fine = step[found.candidate] + around / self.num_candidates
            fractions = torch.cat([fine, torch.ones_like(fine[:1])])
            found = layer.best(fractions, exact=self.exact)
        if self.joint and layer.has_blocks:
            return problem.better(encoding=layer.jointly(fractions, found.candidate))
        # blocks add up to the output only where their products are all there is
        comparable = self.loss == "mse" and not layer.has_blocks
        return problem.better(encoding=found.encoding, loss=(start.before, found.error) if comparable else None)


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """Candidates, in the shape of the scale, and the encoding with them; the error with it and with the last ones."""

    candidate: Tensor
    encoding: Encoding
    error: float
    before: float


class _Layer:
    """A layer whose columns lie by the blocks of its scales."""

    def __init__(self, problem: LayerState, loss: str) -> None:
        owner = problem.owner()
        columns = owner.shape[-1]
        block = block_of(owner)
        order: Tensor | slice = slice(None)
        if block is None:  # blocks that are no runs: channels of a convolution, one place of its kernel
            order = owner[0, 0].argsort(stable=True)
            block = block_of(owner[..., order])
        if block is None:
            raise CalibrationError(f"{problem.encoding.spec} cuts the columns of the layer unevenly")
        linear = None if problem.error.linear is None else problem.error.linear[..., order]
        gram = problem.error.gram if isinstance(order, slice) else problem.error.gram[..., order, :][..., order]
        self._encoding = problem.encoding
        self._whole = OutputError(gram, linear)
        self._error = self._whole.diagonal_blocks(columns // block)
        self._target, self._weight, self._owner = (
            in_blocks(matrix[..., order], columns // block)
            for matrix in (problem.matrix(problem.original), problem.matrix(problem.weight), owner)
        )
        self._judge: Error = self._error
        if loss == "l1":
            rows, apart = (
                in_blocks(part.to(problem.dtype)[..., order], columns // block) for part in problem.moments.sample
            )
            self._judge = AbsoluteError(rows, apart @ self._target.mT)
        elif loss == "sqnr":
            self._judge = self._log_error(problem, order)

    @property
    def has_blocks(self) -> bool:
        """Whether the moments tell more than what is inside of blocks."""
        return self._error is not self._whole

    def best(self, fraction: Tensor, *, exact: bool) -> _Found:
        """Which of the fractions of the present range each scale takes.

        Shape: ``fraction`` [candidates, *scale.shape]; the last is what there is.
        """
        search = self._search(fraction)
        choice = search.best(exact=exact)
        error, before = (float(each.sum(dtype=torch.float64)) for each in (choice.error, choice.last))
        encoding = self._encoding_of(search, choice.candidate)
        return _Found(choice.candidate.reshape(encoding.scale.shape), encoding, error, before)

    def jointly(self, fraction: Tensor, start: Tensor) -> Encoding:
        """The fractions that are good together, from ``start`` or from the last, whichever is better."""
        search = self._search(fraction)
        starts = start.flatten(), torch.full_like(start.flatten(), len(search.scales) - 1)
        errors = [float(self._whole.of(self._joined(search, each)).sum(dtype=torch.float64)) for each in starts]
        better = starts[errors.index(min(errors))]
        return self._encoding_of(search, refine_jointly(search, self._whole, better))

    def _search(self, fraction: Tensor) -> Search:
        scales, zeros = (None if table is None else table.flatten(1) for table in _tables(self._encoding, fraction))
        assert scales is not None
        spec = self._encoding.spec
        return Search(self._judge, self._target, self._weight, self._owner[..., 0], spec, scales, zeros)

    def _encoding_of(self, search: Search, candidate: Tensor) -> Encoding:
        scale, zero = (
            None if table is None else table.gather(0, candidate[None]).reshape(self._encoding.scale.shape)
            for table in (search.scales, search.zero_points)
        )
        assert scale is not None
        return Encoding(self._encoding.spec, scale, zero)

    def _log_error(self, problem: LayerState, order: Tensor | slice) -> LogError:
        """With the squares that no candidate changes: of (X - X̂) w, and of X w."""
        own = OutputError(self._error.gram).of(self._target)
        difference = problem.moments.difference
        if difference is None:
            return LogError(self._error, torch.zeros_like(own), own)
        apart = difference if isinstance(order, slice) else difference[..., order, :][..., order]
        blocks = OutputError(apart.to(problem.dtype)).diagonal_blocks(self._error.blocks)
        constant = blocks.of(self._target)
        return LogError(self._error, constant, self._error.of(self._target) + constant)

    def _joined(self, search: Search, candidate: Tensor) -> Tensor:
        """The change of the weights, as one block."""
        change = self._target - search.rounded(candidate)
        groups, blocks, outputs, block = change.shape
        return change.transpose(1, 2).reshape(groups, 1, outputs, blocks * block)


def _tables(encoding: Encoding, fraction: Tensor) -> tuple[Tensor, Tensor | None]:
    """Scales and zero points of the candidates. Shape: [candidates, *scale.shape], both."""
    if encoding.zero_point is not None:
        return choose_range(encoding.minimum * fraction, encoding.maximum * fraction, encoding.spec)
    return candidates(encoding.scale, fraction, encoding.spec), None
