"""What layer-wise methods need to know of a layer's inputs: products of its columns, summed over all samples.

With X the input of the float model, X̂ that of the quantized one, and ``d = w - ŵ`` the change of one output's weights,
the squared error of that output over all samples is

    |X w - X̂ ŵ|² = wᵀ D w + 2 wᵀ E d + dᵀ H d        H = X̂ᵀX̂, E = (X - X̂)ᵀX̂, D = (X - X̂)ᵀ(X - X̂)

so that no sample need be kept. ``qtk.numerics.im2col`` says what X is for a convolution.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qtk.errors import CalibrationError
from qtk.layerwise.row_sample import RowSample
from qtk.numerics.im2col import Geometry, rows_of

NOTHING_SEEN = "no data was observed; calibrate with data that reaches this layer"

PANEL = 256
"""Columns of a Gram matrix computed together; what lies left of them is copied from the other side."""

ROWS_AT_ONCE = 1 << 24
"""Elements of a convolution's rows that are laid out together, at most; one sample at least."""

CARRIED = 16
"""Batches summed in the dtype of their products before the sum is added in float64."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which sums to form of a layer's input.

    Args:
        block: elements of X that are looked at together, a divisor of its columns: only the diagonal blocks of the
            matrices are summed. ``None``: all.
        difference: D too.
        sample: rows of X̂ and X to keep as they are, at most.
        gram: H and E; without them only means.
        dtype: in which the products of one batch are formed.
    """

    block: int | None = None
    difference: bool = False
    sample: int = 0
    gram: bool = True
    dtype: torch.dtype = torch.float32


WHOLE_FLOAT32 = Wanted()


class SecondMoments:
    """Sums H, and where both inputs are shown E, over batches: a few in float32, these in float64.

    Args:
        geometry: of the layer.
        wanted: which sums.
        weight: of the one layer it is for, if known: ``wᵀ E`` is summed in place of E, which costs less where there
            are few outputs. Only for all columns at once.

    Shape: ``weight`` [groups, outputs, columns].

    >>> moments = SecondMoments(Geometry.linear())
    >>> moments.observe(torch.tensor([[1.0, 2.0], [0.0, 1.0]]))
    >>> moments.gram
    tensor([[[[1., 2.],
              [2., 5.]]]], dtype=torch.float64)
    """

    def __init__(self, geometry: Geometry, wanted: Wanted = WHOLE_FLOAT32, *, weight: Tensor | None = None) -> None:
        assert weight is None or wanted.block is None
        self.geometry = geometry
        self.wanted = wanted
        self._weight = None if weight is None else weight.to(wanted.dtype)
        self._is_of_one_weight = weight is not None
        self.rows = 0
        self._sums: dict[str, Tensor] = {}
        self._products: dict[str, _Products] = {}
        self._sample = RowSample(wanted.sample)

    @property
    def gram(self) -> Tensor:
        """H; to be read only.

        Shape: float64 [groups, blocks, block, block].

        Raises: CalibrationError if nothing was seen, or squares are too large for the dtype of the products.
        """
        return self.gram_as(torch.float64)

    @property
    def cross(self) -> Tensor | None:
        """E, ``None`` where both inputs were one, or ``wᵀ E`` was summed. Shape: as ``gram``."""
        return self._seen("cross") if self.has_two_inputs and not self._is_of_one_weight else None

    def linear(self, weight: Tensor) -> Tensor | None:
        """``wᵀ E``, ``None`` where both inputs were one. Shape: as ``weight``, and in its dtype.

        Args:
            weight: w, [groups, outputs, columns]; that of the layer, if one was given.
        """
        if not self.has_two_inputs:
            return None
        if self._is_of_one_weight:
            return self._seen("linear", weight.dtype)[:, 0]
        cross = self._seen("cross", weight.dtype)
        groups, blocks, block, _ = cross.shape
        parts = weight.reshape(groups, -1, blocks, block).transpose(1, 2) @ cross
        return parts.transpose(1, 2).reshape(weight.shape)

    def gram_as(self, dtype: torch.dtype) -> Tensor:
        """``gram`` in another dtype, without the way over float64 where that is not needed."""
        gram = self._seen("gram", dtype)
        if not bool(gram.diagonal(dim1=-2, dim2=-1).isfinite().all()):  # it bounds the rest
            raise CalibrationError("the squares of a layer's input are beyond float32; scale the data down")
        return _mirrored(gram)

    @property
    def difference(self) -> Tensor | None:
        """D, likewise; only if wanted."""
        return _mirrored(self._seen("difference")) if self.has_two_inputs and self.wanted.difference else None

    @property
    def sample(self) -> tuple[Tensor, Tensor]:
        """Rows of X̂, and of X - X̂. Shape: [groups, rows, columns] each. Raises: CalibrationError if none were kept."""
        if not self.wanted.sample or not self.rows:
            raise CalibrationError(NOTHING_SEEN)
        quantized, apart = self._sample.rows.chunk(2, -1)
        return quantized, apart

    @property
    def mean(self) -> Tensor:
        """Mean of X̂ over rows. Shape: float64 [groups, columns]. Raises: CalibrationError if nothing was seen."""
        return self._seen("sum").flatten(1) / self.rows

    @property
    def mean_difference(self) -> Tensor | None:
        """Mean of X - X̂ over rows, ``None`` where both inputs were one. Shape: float64 [groups, columns]."""
        return self._seen("apart").flatten(1) / self.rows if self.has_two_inputs else None

    @property
    def columns(self) -> int:
        """Of one group's rows."""
        total = self._sums.get("sum")
        return 0 if total is None else total.shape[1] * total.shape[2]

    @property
    def has_two_inputs(self) -> bool:
        """Whether X was ever shown beside X̂."""
        return "apart" in self._sums

    @torch.no_grad()
    def observe(self, quantized: Tensor, original: Tensor | None = None) -> None:
        """Takes one batch of X̂ in, and of X where it differs.

        Raises: CalibrationError if it holds NaN or ±inf; nothing has changed then.
        """
        if not quantized.numel():
            return
        if not all(bool(x.sum(dtype=torch.float32).isfinite()) for x in (quantized, original) if x is not None):
            raise CalibrationError("NaN or infinity in the input of a layer; clean the data")
        pieces = self._pieces(quantized)
        others = [None] * len(pieces) if original is None else self._pieces(original)
        for part, other in zip(pieces, others, strict=True):
            self._observe(part, other)

    def _pieces(self, x: Tensor) -> Sequence[Tensor]:
        """A few samples of a convolution at a time: its rows take many times the room of its input."""
        geometry = self.geometry
        if x.ndim != len(geometry.kernel) + 2 or not geometry.kernel or not x.numel():
            return [x]
        stretch = math.prod(geometry.stride) if geometry.transposed else 1
        return torch.split(x, max(1, ROWS_AT_ONCE // (x[0].numel() * geometry.places * stretch)))

    def _observe(self, quantized: Tensor, original: Tensor | None) -> None:
        columns = self._columns(quantized)
        apart = None if original is None else self._columns(original) - columns
        self.rows += columns.shape[2]
        self._add({"sum": columns.sum(2)} | ({} if apart is None else {"apart": apart.sum(2)}))
        if self.wanted.sample:
            rows = columns.transpose(1, 2).flatten(2)
            other = torch.zeros_like(rows) if apart is None else apart.transpose(1, 2).flatten(2)
            self._sample.add(torch.cat([rows, other], -1))
        if not self.wanted.gram:
            return
        self._multiply("gram", columns)
        if apart is not None:
            if self._weight is None:
                self._multiply("cross", apart, columns)
            else:
                self._multiply("linear", torch.bmm(apart[:, 0], self._weight.mT)[:, None], columns)
            if self.wanted.difference:
                self._multiply("difference", apart)

    def merge(self, other: SecondMoments) -> None:
        """Takes in what ``other`` has seen.

        Raises: CalibrationError if it is of another layer.
        """
        if (other.geometry, other.wanted) != (self.geometry, self.wanted):
            raise CalibrationError(f"{other.wanted} of {other.geometry} cannot join {self.wanted} of {self.geometry}")
        if self.wanted.sample and other.rows:
            if self.rows:
                self._sample.merge(other._sample)
            else:
                self._sample = other._sample.moved(next(iter(other._sums.values())).device)
        self.rows += other.rows
        self._carry()
        other._carry()
        self._add(other._sums)

    def moved(self, device: torch.device) -> SecondMoments:
        """A copy on a device."""
        copied = SecondMoments(self.geometry, self.wanted)
        copied._is_of_one_weight = self._is_of_one_weight
        copied.rows = self.rows
        copied._sample = self._sample.moved(device)
        self._carry()
        copied._sums = {name: total.to(device, copy=True) for name, total in self._sums.items()}
        return copied

    def _columns(self, x: Tensor) -> Tensor:
        """Shape: [groups, blocks, rows, block]."""
        rows = rows_of(x.to(self.wanted.dtype), self.geometry)
        groups, count, width = rows.shape
        block = self.wanted.block or width
        if width % block:
            raise CalibrationError(f"blocks of {block} do not divide the {width} columns of a layer's input")
        return rows.reshape(groups, count, width // block, block).transpose(1, 2)

    def _seen(self, name: str, dtype: torch.dtype = torch.float64) -> Tensor:
        if name in self._products and name not in self._sums and dtype == self.wanted.dtype:
            return self._products[name].total
        self._carry()
        if name not in self._sums:
            raise CalibrationError(NOTHING_SEEN)
        return self._sums[name].to(dtype)

    def _multiply(self, name: str, left: Tensor, right: Tensor | None = None) -> None:
        if name not in self._products:
            self._products[name] = _Products(left, right)
        products = self._products[name]
        products.add(left, right)
        if products.batches == CARRIED:
            self._add({name: self._products.pop(name).total})

    def _carry(self) -> None:
        for name in list(self._products):
            self._add({name: self._products.pop(name).total})

    def _add(self, sums: Mapping[str, Tensor]) -> None:
        for name, added in sums.items():
            own = self._sums.get(name)
            self._sums[name] = added.to(torch.float64, copy=True) if own is None else own + added.to(own)


class _Products:
    """A sum of products of a few batches; of the symmetric ones only the panels of the diagonal and what is right.

    Args:
        left: the first left factor.
        right: the first right one.

    Shape: factors [groups, blocks, rows, left or right]; ``total`` [groups, blocks, left, right].
    """

    def __init__(self, left: Tensor, right: Tensor | None) -> None:
        width = (left if right is None else right).shape[-1]
        self.total = left.new_zeros(*left.shape[:2], left.shape[-1], width)
        self.batches = 0

    def add(self, left: Tensor, right: Tensor | None) -> None:
        """Adds ``leftᵀ right``, or ``leftᵀ left``."""
        self.batches += 1
        total, left = self.total.flatten(0, 1), left.flatten(0, 1)
        if right is not None:
            total.baddbmm_(left.mT, right.flatten(0, 1))
            return
        for begin in range(0, left.shape[-1], PANEL):
            end = begin + PANEL
            total[:, begin:end, begin:].baddbmm_(left[..., begin:end].mT, left[..., begin:])


def _mirrored(half: Tensor) -> Tensor:
    """Fills in what lies left of the diagonal's panels; nobody else reads it. Changes ``half``."""
    for begin in range(PANEL, half.shape[-1], PANEL):
        half[..., begin : begin + PANEL, :begin] = half[..., :begin, begin : begin + PANEL].mT
    return half
