"""What layer-wise methods need to know of a layer's inputs: products of its columns, summed over all samples.

With X the input of the float model, X̂ that of the quantized one, and ``d = w - ŵ`` the change of one output's weights,
the squared error of that output over all samples is

    |X w - X̂ ŵ|² = wᵀ D w + 2 wᵀ E d + dᵀ H d        H = X̂ᵀX̂, E = (X - X̂)ᵀX̂, D = (X - X̂)ᵀ(X - X̂)

so that no sample need be kept. ``qtk.numerics.patches`` says what X is for a convolution.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qtk.errors import CalibrationError
from qtk.numerics.patches import Geometry, rows_of

PANEL = 512
"""Columns of a Gram matrix computed together; what lies left of them is copied from the other side."""


class SecondMoments:
    """Sums H, and where both inputs are shown E and D, over batches in float64.

    Args:
        geometry: of the layer.
        block: elements of X that are looked at together, a divisor of its columns: only the diagonal blocks of the
            matrices are summed. ``None``: all.
        dtype: in which the products of one batch are formed.

    >>> moments = SecondMoments(Geometry.linear())
    >>> moments.observe(torch.tensor([[1.0, 2.0], [0.0, 1.0]]))
    >>> moments.gram
    tensor([[[[1., 2.],
              [2., 5.]]]], dtype=torch.float64)
    """

    def __init__(
        self, geometry: Geometry, *, block: int | None = None, dtype: torch.dtype = torch.float32
    ) -> None:
        self.geometry = geometry
        self.block = block
        self.dtype = dtype
        self.rows = 0
        # [groups, blocks, block, block] each, and [groups, columns]
        self._gram: Tensor | None = None
        self._cross: Tensor | None = None
        self._difference: Tensor | None = None
        self._mean: Tensor | None = None

    @property
    def gram(self) -> Tensor:
        """H. Shape: float64 [groups, blocks, block, block]. Raises: CalibrationError if nothing was seen."""
        if self._gram is None:
            raise CalibrationError("no data was observed; calibrate with data that reaches this layer")
        return self._gram

    @property
    def cross(self) -> Tensor | None:
        """E, ``None`` where both inputs were one. Shape: as ``gram``."""
        return self._cross

    @property
    def difference(self) -> Tensor | None:
        """D, likewise."""
        return self._difference

    @property
    def mean_difference(self) -> Tensor | None:
        """Mean of X - X̂ over rows, ``None`` where both inputs were one. Shape: float64 [groups, columns]."""
        return None if self._mean is None else self._mean / self.rows

    @torch.no_grad()
    def observe(self, quantized: Tensor, original: Tensor | None = None) -> None:
        """Takes one batch of X̂ in, and of X where it differs.

        Raises: CalibrationError if it holds NaN or ±inf, or X comes with some batches only; nothing has changed then.
        """
        if self.rows and (original is None) != (self._cross is None):
            raise CalibrationError("every batch must come with the input of the float model, or none")
        columns = self._columns(quantized)
        if not columns.numel():
            return
        gram = _gram(columns)
        if original is not None:
            apart = self._columns(original) - columns
            cross = (apart.mT @ columns).to(torch.float64)
            mean = apart.sum(2, dtype=torch.float64).flatten(1)
            squares = _gram(apart)
            if not bool(cross.isfinite().all() & squares.isfinite().all()):
                raise CalibrationError("NaN or infinity in the input of a layer; clean the data")
        if not bool(gram.isfinite().all()):
            raise CalibrationError("NaN or infinity in the input of a layer; clean the data")
        self.rows += columns.shape[2]
        self._gram = gram if self._gram is None else self._gram + gram
        if original is not None:
            self._cross = cross if self._cross is None else self._cross + cross
            self._difference = squares if self._difference is None else self._difference + squares
            self._mean = mean if self._mean is None else self._mean + mean

    def merge(self, other: SecondMoments) -> None:
        """Takes in what ``other`` has seen.

        Raises: CalibrationError if it is of another layer, or one of them saw X and the other did not.
        """
        if self.rows and other.rows and (self._cross is None) != (other._cross is None):
            raise CalibrationError("every batch must come with the input of the float model, or none")
        if (other.geometry, other.block) != (self.geometry, self.block):
            raise CalibrationError(f"moments of {other.geometry} in blocks of {other.block} cannot join moments of "
                                   f"{self.geometry} in blocks of {self.block}")
        self.rows += other.rows
        for name in ("_gram", "_cross", "_difference", "_mean"):
            own, added = getattr(self, name), getattr(other, name)
            if added is not None:
                setattr(self, name, added if own is None else own + added.to(own.device))

    def _columns(self, x: Tensor) -> Tensor:
        """Shape: [groups, blocks, rows, block]."""
        rows = rows_of(x.to(self.dtype), self.geometry)
        groups, count, width = rows.shape
        block = self.block or width
        if width % block:
            raise CalibrationError(f"blocks of {block} do not divide the {width} columns of a layer's input")
        return rows.reshape(groups, count, width // block, block).transpose(1, 2)


def _gram(columns: Tensor) -> Tensor:
    """``columnsᵀ columns``, of which only one half is computed.

    Shape: [..., rows, width]; result float64 [..., width, width].
    """
    width = columns.shape[-1]
    gram = torch.empty((*columns.shape[:-2], width, width), dtype=torch.float64, device=columns.device)
    for begin in range(0, width, PANEL):
        end = min(begin + PANEL, width)
        part = columns[..., begin:end].mT @ columns[..., begin:]
        gram[..., begin:end, begin:] = part
        gram[..., begin:, begin:end] = part.mT
    return gram
