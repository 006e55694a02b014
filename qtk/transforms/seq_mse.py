"""Sequential MSE: the scales of a weight with which the output of its layer changes least."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qtk.algorithms.output_error import OutputError
from qtk.algorithms.seq_mse import Search, made_up_for
from qtk.core.encoding import Encoding
from qtk.errors import CalibrationError
from qtk.numerics.ranges import choose_range
from qtk.numerics.scale_formats import candidates
from qtk.observers.second_moments import Wanted
from qtk.transforms.layer_problem import LayerProblem, block_of


@dataclass(frozen=True, slots=True)
class SeqMse:
    """Of the ranges ``i / num_candidates`` times the present one, takes for each scale the one of least error.

    Scales stored in few bits (MX, NVFP4, LPBQ) are searched among those that can be stored.

    Args:
        num_candidates: ranges tried.
        refine: try as many once more, around the winner.
        joint: let blocks make up for each other: judged by the whole output, one after the other.
    """

    num_candidates: int = 20
    refine: bool = False
    joint: bool = False

    def __post_init__(self) -> None:
        if self.num_candidates < 1:
            raise CalibrationError(f"seq_mse needs num_candidates ≥ 1, got {self.num_candidates}")

    def wants(self, block: int | None) -> Wanted:
        return Wanted(None if self.joint else block)

    def apply(self, problem: LayerProblem) -> LayerProblem:
        search = _Layer(problem)
        step = torch.arange(1, self.num_candidates + 1, device=problem.weight.device) / self.num_candidates
        coarse = step.reshape(-1, *(1 for _ in problem.encoding.scale.shape))
        chosen, encoding = search.best(coarse, joint=self.joint)
        if self.refine and problem.encoding.spec.scale_format is None:
            around = torch.linspace(-1, 1, self.num_candidates + 2, device=step.device)[1:-1]
            around = torch.cat([around.new_zeros(1), around]).reshape(-1, *coarse.shape[1:])
            _, encoding = search.best(step[chosen] + around / self.num_candidates, joint=self.joint)
        return replace(problem, encoding=encoding)


class _Layer:
    """A layer whose columns lie by the blocks of its scales."""

    def __init__(self, problem: LayerProblem) -> None:
        owner = problem.owner()
        block = block_of(owner)
        order: Tensor | slice = slice(None)
        if block is None:  # blocks that are no runs: channels of a convolution, one place of its kernel
            order = owner[0, 0].argsort(stable=True)
            block = block_of(owner[..., order])
        if block is None:
            raise CalibrationError(f"{problem.name}: {problem.encoding.spec} cuts the columns of the layer unevenly")
        self._encoding = problem.encoding
        self._owner = owner[..., order][..., ::block]
        self._target, self._weight = (
            problem.matrix(weight)[..., order] for weight in (problem.original, problem.weight)
        )
        error = problem.error()
        linear = None if error.linear is None else error.linear[..., order]
        self._whole = OutputError(error.gram[..., order, :][..., order], linear)
        self._error = self._whole.diagonal_blocks(block)

    def best(self, fraction: Tensor, *, joint: bool) -> tuple[Tensor, Encoding]:
        """Which of the fractions of the present range each scale takes, and the encoding with these.

        Shape: ``fraction`` [candidates, *scale.shape], or of one element an axis; result int64, as the scale.
        """
        spec, shape = self._encoding.spec, self._encoding.scale.shape
        tables = _tables(self._encoding, fraction)
        scales, zeros = (None if table is None else table.flatten(1) for table in tables)
        assert scales is not None
        search = Search(self._error, self._target, self._weight, self._owner, spec, scales, zeros)
        chosen = search.best().candidate
        if joint and self._error is not self._whole:
            chosen = made_up_for(search, self._whole, chosen)
        scale, zero = (None if table is None else table.gather(0, chosen[None]).reshape(shape)
                       for table in (scales, zeros))
        assert scale is not None
        return chosen.reshape(shape), Encoding(spec, scale, zero)


def _tables(encoding: Encoding, fraction: Tensor) -> tuple[Tensor, Tensor | None]:
    """Scales and zero points of the candidates. Shape: [candidates, *scale.shape], both."""
    if encoding.zero_point is not None:
        return choose_range(encoding.minimum * fraction, encoding.maximum * fraction, encoding.spec)
    return candidates(encoding.scale, fraction, encoding.spec), None
