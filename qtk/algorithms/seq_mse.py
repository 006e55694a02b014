"""Sequential MSE on second moments: of many candidates for each scale the one with the least error of the output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qtk.algorithms.output_error import Error, Estimate, OutputError
from qtk.core.granularity import PerChannel
from qtk.core.spec import QuantSpec
from qtk.errors import SpecError
from qtk.ops.simulate import simulate

CONTENDERS = 3
"""Candidates of a scale whose errors decide, once estimates have left them."""
AT_ONCE = 1 << 19
"""Weights whose errors are computed together: what does not leave the cache between two operations."""
WORTH_ESTIMATING = 256
"""Columns of a block from which on estimating is cheaper."""

ALL = slice(None)


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """The candidate taken for each scale, int64, its error and that of the last candidate, without the constant.

    Shape: [scales], each.
    """

    candidate: Tensor
    error: Tensor
    last: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Search:
    """A search over the candidates of every scale of a layer.

    Args:
        error: of the output, block by block: for each block of columns with scales of its own.
        target: the weights of the float model.
        weight: those to be rounded; mostly the same.
        owner: which scale the weights of an output and a block go by; a scale of several is decided by the sum of
            their errors.
        spec: of the weight.
        scales: the candidates, the present ones last.
        zero_points: theirs, ``None`` if symmetric.

    Shape: ``target`` and ``weight`` [groups, blocks, outputs, block]; ``owner`` int64 [groups, blocks, outputs];
    ``scales`` float32 and ``zero_points`` int32 [candidates, scales].

    Raises: SpecError if ``owner`` and ``error`` do not have the same blocks.
    """

    error: Error
    target: Tensor
    weight: Tensor
    owner: Tensor
    spec: QuantSpec
    scales: Tensor
    zero_points: Tensor | None = None

    def __post_init__(self) -> None:
        blocks = self.error.blocks
        if self.owner.shape[1] != blocks:
            raise SpecError(f"{self.owner.shape[1]} scales along the columns need the moments of as many blocks; there "
                            f"are {blocks}; gather them in blocks as long as those of the scales")

    def best(self, *, exact: bool = False) -> Choice:
        """The best of all candidates; the first of equal ones.

        Args:
            exact: compute the error of every candidate. Otherwise an estimate picks those of each scale that come into
                question, and their errors decide; where blocks are small all are computed anyway.
        """
        tried = torch.arange(len(self.scales), device=self.scales.device)[:, None].expand_as(self.scales)
        worth = len(tried) > CONTENDERS + 1 and self.weight.shape[-1] >= WORTH_ESTIMATING
        if not exact and worth and isinstance(self.error, OutputError):
            rough = self._errors(self.error.estimate(), tried[:-1])
            tried = torch.cat([rough.topk(CONTENDERS, 0, largest=False).indices.sort(0).values, tried[-1:]])
        errors = self._errors(self.error, tried)
        least = errors.min(0)
        return Choice(tried.gather(0, least.indices[None])[0], least.values, errors[-1])

    def each(self, candidate: int) -> Tensor:
        """One candidate for all scales. Shape: int64 [scales]."""
        return torch.full(self.scales.shape[1:], candidate, dtype=torch.int64, device=self.scales.device)

    def rounded(self, candidate: Tensor, blocks: slice = ALL, outputs: slice = ALL) -> Tensor:
        """Weights with a candidate for each scale. Shape: int64 [scales]; result [groups, blocks, outputs, block]."""
        weight, owner = self.weight[:, blocks, outputs], self.owner[:, blocks, outputs].flatten()
        scale = self.scales.gather(0, candidate[None])[0][owner]
        zero = None if self.zero_points is None else self.zero_points.gather(0, candidate[None])[0][owner]
        spec = replace(self.spec, granularity=PerChannel(0), scale_format=None)
        rows = weight.reshape(len(owner), -1).to(torch.float32)
        return simulate(rows, spec, scale, zero).to(weight.dtype).reshape(weight.shape)

    def _errors(self, error: Error | Estimate, candidates: Sequence[Tensor] | Tensor) -> Tensor:
        """Errors of candidates, summed over what shares a scale. Shape: [candidates, scales], both."""
        total = self.target.new_zeros(len(candidates), self.scales.shape[1])
        for blocks, outputs in self._pieces():
            target, owner = self.target[:, blocks, outputs], self.owner[:, blocks, outputs].flatten()
            own = error.part(blocks, outputs)
            for index, candidate in enumerate(candidates):
                parts = own.of(target - self.rounded(candidate, blocks, outputs))
                total[index].index_add_(0, owner, parts.flatten())
        return total

    def _pieces(self) -> Iterator[tuple[slice, slice]]:
        """Some blocks, or some outputs of the only block, at a time."""
        groups, blocks, outputs, block = self.weight.shape
        if blocks > 1:
            step = max(1, AT_ONCE // (groups * outputs * block))
            yield from ((slice(begin, begin + step), ALL) for begin in range(0, blocks, step))
        else:
            step = max(1, AT_ONCE // (groups * block))
            yield from ((ALL, slice(begin, begin + step)) for begin in range(0, outputs, step))


def refine_jointly(search: Search, whole: OutputError, start: Tensor, *, sweeps: int = 4) -> Tensor:
    """Candidates that are good together: block after block takes the one best for the whole output, given the others.

    No sweep raises the error. Later blocks so make up for what earlier ones lose, and the other way round.

    Args:
        search: over the scales.
        whole: the error of the whole output, of one block.
        start: the first candidates.
        sweeps: over all blocks, at most; it ends when a sweep changes nothing.

    Shape: ``start`` and result int64 [scales].
    """
    chosen = start.clone()
    groups, blocks, outputs, block = search.weight.shape
    change = search.target - search.rounded(chosen)
    slope = whole.slope(change.transpose(1, 2).reshape(groups, 1, outputs, blocks * block))
    parts = [_part(search, index) for index in range(blocks)]
    for _ in range(sweeps):
        before = chosen.clone()
        for index, (scales, own) in enumerate(parts):
            one, here = slice(index, index + 1), slice(index * block, (index + 1) * block)
            error = OutputError(whole.gram[:, :, here, here], slope[..., here])
            gains = torch.zeros_like(own.scales, dtype=slope.dtype)
            for candidate, gain in enumerate(gains):
                near = own.rounded(own.each(candidate))
                gain.index_add_(0, own.owner.flatten(), error.of(own.target - near - change[:, one]).flatten())
            best = gains.min(0)
            chosen[scales] = torch.where(best.values < 0, best.indices, chosen[scales])
            move = own.target - own.rounded(chosen[scales]) - change[:, one]
            slope += move @ whole.gram[:, :, here]
            change[:, one] += move
        if torch.equal(chosen, before):
            break
    return chosen


def _part(search: Search, index: int) -> tuple[Tensor, Search]:
    """The scales of one block of columns, and the search over them."""
    one = slice(index, index + 1)
    scales, owner = torch.unique(search.owner[:, one], return_inverse=True)
    zeros = None if search.zero_points is None else search.zero_points[:, scales]
    return scales, replace(
        search, error=search.error.part(one, ALL), target=search.target[:, one], weight=search.weight[:, one],
        owner=owner, scales=search.scales[:, scales], zero_points=zeros,
    )
