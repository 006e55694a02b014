"""The error of a layer's output under a change of its weights, computed from Gram matrices instead of samples.

For the weights w of one output, the rounded ŵ and ``d = w - ŵ``, the squared error over all samples is

    constant + 2 linear·d + dᵀ H d        linear = wᵀ E, constant = wᵀ D w

with H, E and D as in ``qtk.moments.second_moments``; the constant does not depend on ŵ. Weights are laid out by
blocks of columns: [groups, blocks, outputs, block]. With several blocks, each has an error of its own: the error of
a summand of the output if only the diagonal blocks of E are known; the error of the whole output, with all other blocks
unrounded, if E is known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from qtk.algorithms.hessian_factor import HessianFactor, column_order

PANEL = 256
"""Columns of a Gram matrix that are multiplied together."""


def in_blocks(matrix: Tensor, blocks: int) -> Tensor:
    """Weights by blocks of columns. Shape: [groups, outputs, columns]; result [groups, blocks, outputs, block]."""
    groups, outputs, columns = matrix.shape
    return matrix.reshape(groups, outputs, blocks, columns // blocks).transpose(1, 2).contiguous()


@dataclass(frozen=True, slots=True, eq=False)
class OutputError:
    """The squared error of the output as a quadratic form, without its constant.

    Args:
        gram: H, in the dtype to compute in.
        linear: ``None`` for 0.
        factors: of H, made so far.

    Shape: ``gram`` [groups, blocks, block, block]; ``linear`` [groups, blocks, outputs, block].

    >>> x, change = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([0.5, 0.0])
    >>> OutputError((x.mT @ x)[None, None]).of(change[None, None, None]).item(), (x @ change).square().sum().item()
    (2.5, 2.5)
    """

    gram: Tensor
    linear: Tensor | None = None
    factors: dict[tuple[float, bool], HessianFactor] = field(default_factory=dict)

    @property
    def blocks(self) -> int:
        return self.gram.shape[1]

    def factor(self, damping: float, act_order: bool) -> HessianFactor:
        """The factor of the Gram matrix of all columns, made once. Arguments and errors: as ``qtk.algorithms.gptq``."""
        key = damping, act_order
        if key not in self.factors:
            gram = self.gram[:, 0]
            self.factors[key] = HessianFactor.of(gram, column_order(gram, act_order), damping, gram.dtype)
        return self.factors[key]

    def of(self, change: Tensor) -> Tensor:
        """``2 linear·d + dᵀ H d``. Shape: ``change`` d, [groups, blocks, outputs, block]; result without the last."""
        summand = _twice_upper(change, self.gram)
        if self.linear is not None:
            summand.add_(self.linear, alpha=2)
        return summand.mul_(change).sum(-1)

    def half_gradient(self, change: Tensor) -> Tensor:
        """``linear + H d``: half of the gradient. Shape: ``change`` and result [groups, blocks, outputs, block]."""
        product = change @ self.gram
        return product if self.linear is None else product.add_(self.linear)

    def diagonal_blocks(self, blocks: int) -> OutputError:
        """The error of ``blocks`` blocks of columns, each by itself."""
        groups, present_blocks, columns, _ = self.gram.shape
        if present_blocks == blocks:
            return self
        block = columns // blocks
        tiles = self.gram.reshape(groups, blocks, block, blocks, block)
        diagonal = tiles.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2).contiguous()  # diagonal puts its axis last
        return OutputError(diagonal, None if self.linear is None else in_blocks(self.linear[:, 0], blocks))

    def select(self, blocks: slice, outputs: slice | Tensor) -> OutputError:
        """The error of some blocks and outputs alone."""
        return OutputError(self.gram[:, blocks], None if self.linear is None else self.linear[:, blocks, outputs])

    def of_uncorrelated(self) -> DiagonalError:
        """The error as it would be if the columns were uncorrelated, which is cheaper to evaluate."""
        return DiagonalError(self.gram.diagonal(dim1=-2, dim2=-1)[:, :, None])


def _twice_upper(change: Tensor, gram: Tensor) -> Tensor:
    """A product whose product with ``change`` is ``dᵀ H d``: half of H by panels, twice, since it is symmetric."""
    columns = gram.shape[-1]
    if columns <= PANEL:
        return change @ gram
    flat, gram = change.flatten(0, 1), gram.flatten(0, 1)
    result = torch.empty_like(flat)
    for begin in range(0, columns, PANEL):
        here, later = slice(begin, begin + PANEL), slice(begin + PANEL, None)
        product = flat[..., here] @ gram[:, here, here]
        torch.baddbmm(product, flat[..., later], gram[:, later, here], alpha=2, out=result[..., here])
    return result.reshape(change.shape)


@dataclass(frozen=True, slots=True, eq=False)
class AbsoluteError:
    """The sum of the absolute errors ``|X w - X̂ ŵ|`` over a sample of rows.

    Shape: ``rows`` of X̂, [groups, blocks, rows, block]; ``input_error`` (X - X̂) w, [groups, blocks, rows, outputs].
    """

    rows: Tensor
    input_error: Tensor

    @property
    def blocks(self) -> int:
        return self.rows.shape[1]

    def of(self, change: Tensor) -> Tensor:
        """Shape: as ``OutputError.of``."""
        return (self.input_error + self.rows @ change.mT).abs_().sum(-2)

    def select(self, blocks: slice, outputs: slice) -> AbsoluteError:
        """As ``OutputError.select``."""
        return AbsoluteError(self.rows[:, blocks], self.input_error[:, blocks, :, outputs])


@dataclass(frozen=True, slots=True, eq=False)
class LogError:
    """The logarithm of noise over signal of each output; its sum over outputs is the sum of their negative SQNRs.

    Args:
        error: the squared error, without its constant.
        constant: the constant of ``error``.
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

    def select(self, blocks: slice, outputs: slice) -> LogError:
        """As ``OutputError.select``."""
        return LogError(
            self.error.select(blocks, outputs), self.constant[:, blocks, outputs], self.signal[:, blocks, outputs]
        )


@dataclass(frozen=True, slots=True, eq=False)
class ActivationError:
    """The squared error after the activation function f that follows, on a sample of rows: ``(f(y) - f(ŷ))²``.

    AdaRound's equation 25 (arXiv 2004.10568).

    Shape: ``rows`` of X̂, [groups, 1, rows, columns]; ``float_output`` y, of the float weights on X, and
    ``unrounded_output``, of the float weights on X̂, both with the bias: [groups, 1, rows, outputs].
    """

    rows: Tensor
    float_output: Tensor
    unrounded_output: Tensor
    activation: Callable[[Tensor], Tensor]

    def of(self, change: Tensor) -> Tensor:
        """Shape: as ``OutputError.of``."""
        rounded_output = self.unrounded_output - self.rows @ change.mT
        return (self.activation(self.float_output) - self.activation(rounded_output)).square().sum(-2)

    def half_gradient(self, change: Tensor) -> Tensor:
        """Half of the gradient. Shape: as ``OutputError.half_gradient``."""
        with torch.enable_grad():
            rounded_output = (self.unrounded_output - self.rows @ change.mT).requires_grad_()
            (gradient,) = torch.autograd.grad(
                (self.activation(self.float_output) - self.activation(rounded_output)).square().sum(), rounded_output
            )
        return gradient.mT @ self.rows * -0.5


@dataclass(frozen=True, slots=True, eq=False)
class DiagonalError:
    """The squared error of the output with the diagonal of H alone, and without ``linear``.

    Shape: ``diagonal`` [groups, blocks, 1, block].
    """

    diagonal: Tensor

    def of(self, change: Tensor) -> Tensor:
        """Shape: as ``OutputError.of``."""
        return (self.diagonal * change).mul_(change).sum(-1)

    def select(self, blocks: slice, outputs: slice) -> DiagonalError:
        """As ``OutputError.select``."""
        return DiagonalError(self.diagonal[:, blocks])


CandidateError: TypeAlias = OutputError | AbsoluteError | LogError
"""An error by which candidates are compared."""
