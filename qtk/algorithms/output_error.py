"""The error that a change of weights makes in a layer's output, from second moments, at a cost free of samples.

For the weights w of one output and what they become, ŵ, with ``d = w - ŵ`` (``qtk.observers.second_moments``), it is

    constant + 2 linear·d + dᵀ H d        linear = wᵀ E, constant = wᵀ D w

where only the last two depend on ŵ.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class OutputError:
    """What is known of a layer's input, in the dtype in which errors are computed.

    Shape: ``gram`` H, [groups, blocks, block, block], with ``blocks`` times ``block`` columns; with more than one, the
    error is that of each block's part of the output by itself. ``linear`` [groups, outputs, columns], or ``None`` for
    0.
    """

    gram: Tensor
    linear: Tensor | None = None

    def of(self, change: Tensor) -> Tensor:
        """``2 linear·d + dᵀ H d``, block by block.

        Shape: ``change`` d, [groups, outputs, columns]; result [groups, outputs, blocks].
        """
        slope = self.slope(change)
        if self.linear is not None:
            slope = slope + self.linear  # half of the gradient, and the other half of 2 linear·d
        groups, blocks, block, _ = self.gram.shape
        return (slope * change).reshape(groups, -1, blocks, block).sum(-1)

    def slope(self, change: Tensor) -> Tensor:
        """``linear + H d``: half of the gradient. Shape: ``change`` and result [groups, outputs, columns]."""
        groups, blocks, block, _ = self.gram.shape
        parts = change.reshape(groups, -1, blocks, block).transpose(1, 2) @ self.gram
        product = parts.transpose(1, 2).reshape(change.shape)
        return product if self.linear is None else product + self.linear

    def diagonal_blocks(self, block: int) -> OutputError:
        """The same knowing only what is in blocks of the columns."""
        groups, blocks, whole, _ = self.gram.shape
        if block == whole:
            return self
        parts = self.gram.reshape(groups, blocks, whole // block, block, whole // block, block)
        own = parts.diagonal(dim1=2, dim2=4).permute(0, 1, 4, 2, 3)  # diagonal puts its axis last
        return OutputError(own.reshape(groups, -1, block, block).contiguous(), self.linear)
