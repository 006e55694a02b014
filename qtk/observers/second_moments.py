"""What layer-wise methods need to know of a layer's inputs: products of its columns, summed over all samples.

With X the input of the float model, X̂ that of the quantized one, and ``d = w - ŵ`` the change of one output's weights,
the squared error of that output over all samples is

    |X w - X̂ ŵ|² = wᵀ D w + 2 wᵀ E d + dᵀ H d        H = X̂ᵀX̂, E = (X - X̂)ᵀX̂, D = (X - X̂)ᵀ(X - X̂)

so that no sample need be kept. ``qtk.numerics.patches`` says what X is for a convolution.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from qtk.errors import CalibrationError
from qtk.numerics.patches import Geometry, rows_of

SUMS = ("_gram", "_cross", "_difference", "_sum", "_apart")
NOTHING_SEEN = "no data was observed; calibrate with data that reaches this layer"

PANEL = 512
"""Columns of a Gram matrix computed together; what lies left of them is copied from the other side."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which sums to form of a layer's input.

    Args:
        block: elements of X that are looked at together, a divisor of its columns: only the diagonal blocks of the
            matrices are summed. ``None``: all.
        difference: D too.
        dtype: in which the products of one batch are formed.
    """

    block: int | None = None
    difference: bool = False
    dtype: torch.dtype = torch.float32


WHOLE_FLOAT32 = Wanted()


class SecondMoments:
    """Sums H, and where both inputs are shown E, over batches in float64.

    Args:
        geometry: of the layer.
        wanted: which sums.

    >>> moments = SecondMoments(Geometry.linear())
    >>> moments.observe(torch.tensor([[1.0, 2.0], [0.0, 1.0]]))
    >>> moments.gram
    tensor([[[[1., 2.],
              [2., 5.]]]], dtype=torch.float64)
    """

    def __init__(self, geometry: Geometry, wanted: Wanted = WHOLE_FLOAT32) -> None:
        self.geometry = geometry
        self.wanted = wanted
        self.rows = 0
        # [groups, blocks, block, block] each, and [groups, columns]
        self._gram: Tensor | None = None
        self._cross: Tensor | None = None
        self._difference: Tensor | None = None
        self._sum: Tensor | None = None
        self._apart: Tensor | None = None

    @property
    def gram(self) -> Tensor:
        """H. Shape: float64 [groups, blocks, block, block]. Raises: CalibrationError if nothing was seen."""
        if self._gram is None:
            raise CalibrationError(NOTHING_SEEN)
        return self._gram

    @property
    def cross(self) -> Tensor | None:
        """E, ``None`` where both inputs were one. Shape: as ``gram``."""
        return self._cross

    @property
    def difference(self) -> Tensor | None:
        """D, likewise; only if wanted."""
        return self._difference

    @property
    def mean(self) -> Tensor:
        """Mean of X̂ over rows. Shape: float64 [groups, columns]. Raises: CalibrationError if nothing was seen."""
        if self._sum is None:
            raise CalibrationError(NOTHING_SEEN)
        return self._sum / self.rows

    @property
    def mean_difference(self) -> Tensor | None:
        """Mean of X - X̂ over rows, ``None`` where both inputs were one. Shape: float64 [groups, columns]."""
        return None if self._apart is None else self._apart / self.rows

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
        sums: dict[str, Tensor] = {"_gram": _gram(columns), "_sum": columns.sum(2, dtype=torch.float64).flatten(1)}
        if original is not None:
            apart = self._columns(original) - columns
            sums["_cross"] = (apart.mT @ columns).to(torch.float64)
            sums["_apart"] = apart.sum(2, dtype=torch.float64).flatten(1)
            if self.wanted.difference:
                sums["_difference"] = _gram(apart)
        if not all(bool(total.isfinite().all()) for total in sums.values()):
            raise CalibrationError("NaN or infinity in the input of a layer; clean the data")
        self.rows += columns.shape[2]
        self._add(sums)

    def merge(self, other: SecondMoments) -> None:
        """Takes in what ``other`` has seen.

        Raises: CalibrationError if it is of another layer, or one of them saw X and the other did not.
        """
        if self.rows and other.rows and (self._cross is None) != (other._cross is None):
            raise CalibrationError("every batch must come with the input of the float model, or none")
        if (other.geometry, other.wanted) != (self.geometry, self.wanted):
            raise CalibrationError(f"{other.wanted} of {other.geometry} cannot join {self.wanted} of {self.geometry}")
        self.rows += other.rows
        self._add(other.sums())

    def moved(self, device: torch.device) -> SecondMoments:
        """A copy on a device."""
        copied = SecondMoments(self.geometry, self.wanted)
        copied.rows = self.rows
        copied._add({name: total.to(device) for name, total in self.sums().items()})
        return copied

    def sums(self) -> dict[str, Tensor]:
        """What was summed so far."""
        return {name: total for name in SUMS if (total := getattr(self, name)) is not None}

    def _add(self, sums: Mapping[str, Tensor]) -> None:
        for name, added in sums.items():
            own = getattr(self, name)
            setattr(self, name, added if own is None else own + added.to(own.device))

    def _columns(self, x: Tensor) -> Tensor:
        """Shape: [groups, blocks, rows, block]."""
        rows = rows_of(x.to(self.wanted.dtype), self.geometry)
        groups, count, width = rows.shape
        block = self.wanted.block or width
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
