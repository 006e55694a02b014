"""The error that a change of weights makes in a layer's output, from second moments, at a cost free of samples.

For the weights w of one output and what they become, ŵ, with ``d = w - ŵ`` (``qtk.layerwise.second_moments``), it is

    constant + 2 linear·d + dᵀ H d        linear = wᵀ E, constant = wᵀ D w

where only the last two depend on ŵ. Weights lie by blocks of the columns: [groups, blocks, outputs, block]. With more
than one block, the error is that of each block by itself: of its part of the output, where only the diagonal blocks of
E are known; of the whole output, all other blocks being what they were, where E is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

DIRECTIONS = 8
"""Of the inputs that an estimate tells apart; those in which they are largest."""
ROUNDS = 2
"""Of the iteration that finds these."""


def in_blocks(matrix: Tensor, blocks: int) -> Tensor:
    """Weights by blocks of columns. Shape: [groups, outputs, columns]; result [groups, blocks, outputs, block]."""
    groups, outputs, columns = matrix.shape
    return matrix.reshape(groups, outputs, blocks, columns // blocks).transpose(1, 2).contiguous()


@dataclass(frozen=True, slots=True, eq=False)
class OutputError:
    """What is known of a layer's input, in the dtype in which errors are computed.

    Shape: ``gram`` H, [groups, blocks, block, block]; ``linear`` [groups, blocks, outputs, block], or ``None`` for 0.
    """

    gram: Tensor
    linear: Tensor | None = None

    @property
    def blocks(self) -> int:
        return self.gram.shape[1]

    def of(self, change: Tensor) -> Tensor:
        """``2 linear·d + dᵀ H d``. Shape: ``change`` d, [groups, blocks, outputs, block]; result without the last."""
        slope = change @ self.gram
        if self.linear is not None:
            slope.add_(self.linear, alpha=2)
        return slope.mul_(change).sum(-1)

    def slope(self, change: Tensor) -> Tensor:
        """``linear + H d``: half of the gradient. Shape: ``change`` and result [groups, blocks, outputs, block]."""
        product = change @ self.gram
        return product if self.linear is None else product.add_(self.linear)

    def diagonal_blocks(self, blocks: int) -> OutputError:
        """The same knowing only what is inside of each of so many blocks of the columns."""
        groups, before, whole, _ = self.gram.shape
        if before == blocks:
            return self
        block = whole // blocks
        parts = self.gram.reshape(groups, blocks, block, blocks, block)
        own = parts.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2).contiguous()  # diagonal puts its axis last
        return OutputError(own, None if self.linear is None else in_blocks(self.linear[:, 0], blocks))

    def part(self, blocks: slice, outputs: slice) -> OutputError:
        """That of some blocks, or outputs, alone."""
        return OutputError(self.gram[:, blocks], None if self.linear is None else self.linear[:, blocks, outputs])

    def estimate(self) -> Estimate:
        """The error of a change, roughly, for a small part of the cost.

        The Gram matrix is taken for a few of its eigenvectors and what they leave of its diagonal, V Λ Vᵀ + diag(a).
        The eigenvectors are those that subspace iteration finds from random ones.
        """
        block = self.gram.shape[-1]
        generator = torch.Generator().manual_seed(0)
        start = torch.randn(block, min(DIRECTIONS, block), generator=generator).to(self.gram)
        basis = torch.linalg.qr(self.gram @ start).Q
        for _ in range(ROUNDS):
            basis = torch.linalg.qr(self.gram @ basis).Q
        values, turn = torch.linalg.eigh(basis.mT @ self.gram @ basis)
        directions = basis @ turn * values.clamp(min=0).sqrt()[..., None, :]
        rest = (self.gram.diagonal(dim1=-2, dim2=-1) - directions.square().sum(-1)).clamp(min=0)
        return Estimate(directions, rest[:, :, None], self.linear)


@dataclass(frozen=True, slots=True, eq=False)
class AbsoluteError:
    """The sum of the absolute errors ``|X w - X̂ ŵ|`` of a sample of rows.

    Shape: ``rows`` of X̂, [groups, blocks, rows, block]; ``before`` (X - X̂) w, [groups, blocks, rows, outputs].
    """

    rows: Tensor
    before: Tensor

    @property
    def blocks(self) -> int:
        return self.rows.shape[1]

    def of(self, change: Tensor) -> Tensor:
        """Shape: as ``OutputError.of``."""
        return (self.before + self.rows @ change.mT).abs_().sum(-2)

    def part(self, blocks: slice, outputs: slice) -> AbsoluteError:
        """As ``OutputError.part``."""
        return AbsoluteError(self.rows[:, blocks], self.before[:, blocks, :, outputs])


@dataclass(frozen=True, slots=True, eq=False)
class LogError:
    """The logarithm of each output's share of noise, so that a sum over outputs is one of their SQNRs.

    Args:
        error: without the constant.
        constant: of the error.
        signal: sum of the squares of the float output.

    Shape: ``constant`` and ``signal`` [groups, blocks, outputs].
    """

    error: OutputError
    constant: Tensor
    signal: Tensor

    @property
    def blocks(self) -> int:
        return self.error.blocks

    def of(self, change: Tensor) -> Tensor:
        """Shape: as ``OutputError.of``."""
        tiny = torch.finfo(change.dtype).tiny
        noise = (self.error.of(change) + self.constant).clamp(min=tiny)
        return (noise / self.signal.clamp(min=tiny)).log()

    def part(self, blocks: slice, outputs: slice) -> LogError:
        """As ``OutputError.part``."""
        return LogError(
            self.error.part(blocks, outputs), self.constant[:, blocks, outputs], self.signal[:, blocks, outputs]
        )


@dataclass(frozen=True, slots=True, eq=False)
class ActivationError:
    """The squared error behind the function that follows, on a sample of rows: ``(f(y) - f(ŷ))²``.

    Shape: ``rows`` of X̂, [groups, 1, rows, columns]; ``output`` y of the float layer and ``near``, that of the float
    weights on X̂, [groups, 1, rows, outputs].
    """

    rows: Tensor
    output: Tensor
    near: Tensor
    function: Callable[[Tensor], Tensor]

    def of(self, change: Tensor) -> Tensor:
        """Shape: as ``OutputError.of``."""
        return (self.function(self.output) - self.function(self.near - self.rows @ change.mT)).square().sum(-2)

    def slope(self, change: Tensor) -> Tensor:
        """Half of the gradient. Shape: as ``OutputError.slope``."""
        with torch.enable_grad():
            near = (self.near - self.rows @ change.mT).requires_grad_()
            (gradient,) = torch.autograd.grad(
                (self.function(self.output) - self.function(near)).square().sum(), near
            )
        return gradient.mT @ self.rows * -0.5


Error: TypeAlias = OutputError | AbsoluteError | LogError
"""What candidates are judged by."""


@dataclass(frozen=True, slots=True, eq=False)
class Estimate:
    """See ``OutputError.estimate``.

    Shape: ``directions`` V √Λ, [groups, blocks, block, few]; ``rest`` a, [groups, blocks, 1, block]; ``linear`` as in
    ``OutputError``.
    """

    directions: Tensor
    rest: Tensor
    linear: Tensor | None

    def of(self, change: Tensor) -> Tensor:
        """As ``OutputError.of``."""
        slope = self.rest * change
        if self.linear is not None:
            slope.add_(self.linear, alpha=2)
        return slope.mul_(change).sum(-1) + (change @ self.directions).square().sum(-1)

    def part(self, blocks: slice, outputs: slice) -> Estimate:
        """As ``OutputError.part``."""
        linear = None if self.linear is None else self.linear[:, blocks, outputs]
        return Estimate(self.directions[:, blocks], self.rest[:, blocks], linear)
