"""Sequential MSE on second moments: of many candidates for each scale the one with the least error of the output."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qtk.algorithms.output_error import OutputError
from qtk.core.granularity import PerChannel
from qtk.core.spec import QuantSpec
from qtk.errors import SpecError
from qtk.ops.simulate import simulate


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """The candidate taken for each scale, int64, and its error without the constant. Shape: [scales]."""

    candidate: Tensor
    error: Tensor


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
        scales: the candidates.
        zero_points: theirs, ``None`` if symmetric.

    Shape: ``target`` and ``weight`` [groups, outputs, columns]; ``owner`` int64 [groups, outputs, blocks]; ``scales``
    float32 and ``zero_points`` int32 [candidates, scales].

    Raises: SpecError if ``owner`` and ``error`` do not have the same blocks.
    """

    error: OutputError
    target: Tensor
    weight: Tensor
    owner: Tensor
    spec: QuantSpec
    scales: Tensor
    zero_points: Tensor | None = None

    def __post_init__(self) -> None:
        blocks = self.error.gram.shape[1]
        if self.owner.shape[2] != blocks:
            raise SpecError(f"{self.owner.shape[2]} scales along the columns need the moments of as many blocks; there "
                            f"are {blocks}; gather them in blocks as long as those of the scales")

    def best(self) -> Choice:
        """The best of all candidates; the first of equal ones."""
        every = torch.stack([self.errors(self.each(index)) for index in range(len(self.scales))])
        least = every.min(0)
        return Choice(least.indices, least.values)

    def each(self, candidate: int) -> Tensor:
        """One candidate for all scales. Shape: [scales]."""
        return torch.full(self.scales.shape[1:], candidate, dtype=torch.int64, device=self.scales.device)

    def errors(self, candidate: Tensor) -> Tensor:
        """Error of one candidate for each scale, without the constant. Shape: [scales], both."""
        return self.by_scale(self.error.of(self.target - self.rounded(candidate)))

    def rounded(self, candidate: Tensor) -> Tensor:
        """The weights with a candidate for each scale. Shape: [scales]; result as ``weight``."""
        return self._nearest(self.weight, self.owner, candidate)

    def by_scale(self, errors: Tensor) -> Tensor:
        """Sums over what shares a scale. Shape: [groups, outputs, blocks]; result [scales]."""
        total = torch.zeros(self.scales.shape[1], dtype=errors.dtype, device=errors.device)
        return total.index_add_(0, self.owner.flatten(), errors.flatten())

    def _nearest(self, weight: Tensor, owner: Tensor, candidate: Tensor) -> Tensor:
        """Weights of whole blocks. Shape: [groups, outputs, blocks · block], [groups, outputs, blocks], [scales]."""
        rows = weight.reshape(owner.numel(), -1).to(torch.float32)
        scale, zero = (
            None if table is None else table.gather(0, candidate[None])[0][owner.flatten()]
            for table in (self.scales, self.zero_points)
        )
        assert scale is not None
        spec = replace(self.spec, granularity=PerChannel(0), scale_format=None)
        return simulate(rows, spec, scale, zero).to(weight.dtype).reshape(weight.shape)


def made_up_for(search: Search, whole: OutputError, start: Tensor, *, sweeps: int = 4) -> Tensor:
    """Candidates that are good together: block after block takes the one best for the whole output, given the others.

    No sweep raises the error. Later blocks so make up for what earlier ones lose, and the other way round.

    Args:
        search: over the scales.
        whole: the error of the whole output.
        start: the first candidates.
        sweeps: over all blocks, at most; it ends when a sweep changes nothing.

    Shape: ``start`` and result int64 [scales].
    """
    chosen = start.clone()
    blocks = search.owner.shape[2]
    width = search.weight.shape[2] // blocks
    change = search.target - search.rounded(chosen)
    slope = whole.slope(change)
    for _ in range(sweeps):
        before = chosen.clone()
        for index in range(blocks):
            here = slice(index * width, (index + 1) * width)
            owner = search.owner[..., index : index + 1]
            target, weight = search.target[..., here], search.weight[..., here]
            gram, rows = whole.gram[:, :, here, here], whole.gram[:, 0, here]
            gains = []
            for candidate in range(len(search.scales)):
                near = search._nearest(weight, owner, search.each(candidate))
                move = target - near - change[..., here]
                gain = 2 * (move * slope[..., here]).sum(-1, keepdim=True) + OutputError(gram).of(move)
                total = torch.zeros_like(search.scales[0], dtype=gain.dtype)
                gains.append(total.index_add_(0, owner.flatten(), gain.flatten()))
            best = torch.stack(gains).min(0)
            mine = torch.zeros_like(chosen, dtype=torch.bool).index_fill_(0, owner.flatten(), value=True)
            taken = torch.where(mine & (best.values < 0), best.indices, chosen)
            near = search._nearest(weight, owner, taken)
            move = target - near - change[..., here]
            slope += move @ rows
            change[..., here] += move
            chosen = taken
        if torch.equal(chosen, before):
            break
    return chosen
