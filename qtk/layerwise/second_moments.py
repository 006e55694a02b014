"""Statistics of a layer's input for layer-wise methods: Gram matrices of its columns, summed over all samples.

With X the input in the float model, X̂ that in the quantized one and ``d = w - ŵ`` the change of one output's weights,
the squared error of that output over all samples is

    |X w - X̂ ŵ|² = wᵀ D w + 2 wᵀ E d + dᵀ H d        H = X̂ᵀX̂, E = (X - X̂)ᵀX̂, D = (X - X̂)ᵀ(X - X̂)

so that no sample need be kept. H is, up to a factor 2, the Hessian of GPTQ and AdaRound. For a convolution,
X is its input in im2col layout, ``qtk.numerics.im2col``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qtk.errors import CalibrationError
from qtk.layerwise.holdout import Holdout
from qtk.numerics.im2col import Geometry, im2col
from qtk.observers.row_sample import RowSample

NO_DATA = "no data was observed; calibrate with data that reaches this layer"

PANEL = 256
"""Columns of a Gram matrix computed together; blocks below the diagonal are copied from above it."""

ELEMENTS_AT_ONCE = 1 << 24
"""Largest number of elements in im2col layout held at a time, but at least one sample."""

CARRIED = 16
"""Number of batches summed in the dtype of their products before the sum is added in float64."""


@dataclass(frozen=True, slots=True)
class RequiredStatistics:
    """Which statistics of a layer's input to collect.

    Args:
        block: columns of X whose products are summed, a divisor of all: the diagonal blocks of the matrices. ``None``:
            all columns.
        difference: whether to sum D.
        sample_rows: rows of X̂ and X to keep as they are, at most.
        gram: whether to sum H and E; without them only means.
        dtype: in which the products of one batch are formed.
        holdout: the samples whose statistics are summed apart from the others; ``None``: none.
    """

    block: int | None = None
    difference: bool = False
    sample_rows: int = 0
    gram: bool = True
    dtype: torch.dtype = torch.float32
    holdout: Holdout | None = None

    @staticmethod
    def union(each: Sequence[RequiredStatistics]) -> RequiredStatistics:
        """Statistics that are enough for all of ``each``: over all columns if the blocks differ.

        >>> RequiredStatistics.union([RequiredStatistics(4, gram=False), RequiredStatistics(4, sample_rows=9)])
        RequiredStatistics(block=4, difference=False, sample_rows=9, gram=True, dtype=torch.float32, holdout=None)
        """
        blocks = {required.block for required in each}
        return RequiredStatistics(
            blocks.pop() if len(blocks) == 1 else None, difference=any(required.difference for required in each),
            sample_rows=max(required.sample_rows for required in each), gram=any(required.gram for required in each),
        )


GRAM_OF_ALL_COLUMNS = RequiredStatistics()


class SecondMoments:
    """Sums H, and E if both inputs are passed, over batches: a few batches in float32, their sums in float64.

    Args:
        geometry: of the layer.
        required: which statistics.
        weight: of the one layer it is for, if known: ``wᵀ E`` is summed in place of E, which costs less where there
            are few outputs. Only for all columns at once.

    Shape: ``weight`` [groups, outputs, columns].

    >>> moments = SecondMoments(Geometry.linear())
    >>> moments.observe(torch.tensor([[1.0, 2.0], [0.0, 1.0]]))
    >>> moments.gram
    tensor([[[[1., 2.],
              [2., 5.]]]], dtype=torch.float64)
    """

    def __init__(
        self, geometry: Geometry, required: RequiredStatistics = GRAM_OF_ALL_COLUMNS, *, weight: Tensor | None = None
    ) -> None:
        assert weight is None or required.block is None
        self.geometry = geometry
        self.required = required
        self.rows = 0
        self._weight = None if weight is None else weight.to(required.dtype)
        self._sums: dict[str, Tensor] = {}
        self._products: dict[str, _Products] = {}
        self._sample = RowSample(required.sample_rows)
        self.held_out: SecondMoments | None = None
        """Statistics of the samples that are held out."""
        if required.holdout is not None:
            self.held_out = SecondMoments(geometry, replace(required, holdout=None), weight=weight)

    @classmethod
    def of_sums(
        cls, geometry: Geometry, required: RequiredStatistics, rows: int, sums: Mapping[str, Tensor], sample: RowSample
    ) -> SecondMoments:
        """The statistics with these ``sums`` over ``rows`` rows."""
        moments = cls(geometry, required)
        moments.rows, moments._sums, moments._sample = rows, dict(sums), sample
        return moments

    @property
    def sums(self) -> Mapping[str, Tensor]:
        """All sums so far, float64, by name; those of two sets of samples add up to those of both."""
        self._carry()
        return self._sums

    @property
    def row_sample(self) -> RowSample:
        """The rows that are kept."""
        return self._sample

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
        return self._sum("cross") if self.has_two_inputs and not self._has_weight_product else None

    def linear(self, weight: Tensor) -> Tensor | None:
        """``wᵀ E``, ``None`` where both inputs were one. Shape: as ``weight``, and in its dtype.

        Args:
            weight: w, [groups, outputs, columns]; that of the layer, if one was given.
        """
        if not self.has_two_inputs:
            return None
        if self._has_weight_product:
            return self._sum("linear", weight.dtype)[:, 0]
        cross = self._sum("cross", weight.dtype)
        groups, blocks, block, _ = cross.shape
        product = weight.reshape(groups, -1, blocks, block).transpose(1, 2) @ cross
        return product.transpose(1, 2).reshape(weight.shape)

    def gram_as(self, dtype: torch.dtype) -> Tensor:
        """``gram`` in another dtype; in that of the products without converting to float64, if possible.

        Raises: CalibrationError as ``gram``.
        """
        gram = self._sum("gram", dtype)
        if not bool(gram.diagonal(dim1=-2, dim2=-1).isfinite().all()):  # it bounds the rest
            raise CalibrationError("the squares of a layer's input are beyond float32; scale the data down")
        return _mirrored(gram)

    @property
    def difference(self) -> Tensor | None:
        """D, ``None`` where both inputs were one or it was not required. Shape: as ``gram``."""
        return _mirrored(self._sum("difference")) if self.has_two_inputs and self.required.difference else None

    @property
    def sample(self) -> tuple[Tensor, Tensor]:
        """Rows of X̂, and of X - X̂. Shape: [groups, rows, columns] each. Raises: CalibrationError if none were kept."""
        if not self.required.sample_rows or not self.rows:
            raise CalibrationError(NO_DATA)
        quantized, input_error = self._sample.rows.chunk(2, -1)
        return quantized, input_error

    @property
    def mean(self) -> Tensor:
        """Mean of X̂ over rows. Shape: float64 [groups, columns]. Raises: CalibrationError if nothing was seen."""
        return self._sum("sum").flatten(1) / self.rows

    @property
    def mean_difference(self) -> Tensor | None:
        """Mean of X - X̂ over rows, ``None`` where both inputs were one. Shape: float64 [groups, columns]."""
        return self._sum("error_sum").flatten(1) / self.rows if self.has_two_inputs else None

    @property
    def rows_of_all(self) -> int:
        """Rows seen, with those held out."""
        return self.rows + (0 if self.held_out is None else self.held_out.rows)

    @property
    def columns(self) -> int:
        """Number of columns of one group; 0 before the first batch."""
        total = self._sums.get("sum")
        return 0 if total is None else total.shape[1] * total.shape[2]

    @property
    def has_two_inputs(self) -> bool:
        """Whether X was ever given beside X̂."""
        return "error_sum" in self._sums

    @property
    def _has_weight_product(self) -> bool:
        """Whether ``wᵀ E`` is summed, not E."""
        return "linear" in self._sums or "linear" in self._products

    @torch.no_grad()
    def observe(
        self, quantized: Tensor, float_input: Tensor | None = None, batch: int = 0, *,
        held_out: tuple[Tensor, Tensor | None] | None = None,
    ) -> None:
        """Adds one batch of X̂, and of X where it differs, with its index.

        Args:
            quantized: X̂.
            float_input: X, ``None`` where it is X̂.
            batch: the index.
            held_out: X̂ and X of what is held out of this batch; ``None``: a part of the others, whose first axis counts
                the samples.

        Raises: CalibrationError if it holds NaN or ±inf; nothing has changed then.
        """
        if not quantized.numel() and held_out is None:
            return
        given = (quantized, float_input, *(held_out or ()))
        if not all(bool(x.sum(dtype=torch.float32).isfinite()) for x in given if x is not None):
            raise CalibrationError("NaN or infinity in the input of a layer; clean the data")
        if self.held_out is not None and self.required.holdout is not None:
            if held_out is None:
                split, other = self.required.holdout.split, None
                quantized, rest = split(self._samples(quantized), batch)
                if float_input is not None:
                    float_input, other = split(self._samples(float_input), batch)
                held_out = rest, other
            self.held_out.observe(*held_out)
        if not quantized.numel():
            return
        pieces = self._pieces(quantized)
        float_pieces = [None] * len(pieces) if float_input is None else self._pieces(float_input)
        for piece, float_piece in zip(pieces, float_pieces, strict=True):
            self._observe(piece, float_piece)

    def _samples(self, x: Tensor) -> Tensor:
        """Adds the axis of samples if there is none."""
        return x if x.ndim > 1 + len(self.geometry.kernel) else x[None]

    def _pieces(self, x: Tensor) -> Sequence[Tensor]:
        """A few samples of a convolution at a time: im2col makes many elements of each."""
        geometry = self.geometry
        if x.ndim != len(geometry.kernel) + 2 or not geometry.kernel or not x.numel():
            return [x]
        stretch = math.prod(geometry.stride) if geometry.transposed else 1
        return torch.split(x, max(1, ELEMENTS_AT_ONCE // (x[0].numel() * geometry.kernel_positions * stretch)))

    def _observe(self, quantized: Tensor, float_input: Tensor | None) -> None:
        columns = self._columns(quantized)
        input_error = None if float_input is None else self._columns(float_input) - columns
        self.rows += columns.shape[2]
        self._add({"sum": columns.sum(2)} | ({} if input_error is None else {"error_sum": input_error.sum(2)}))
        if self.required.sample_rows:
            rows = columns.transpose(1, 2).flatten(2)
            error_rows = torch.zeros_like(rows) if input_error is None else input_error.transpose(1, 2).flatten(2)
            self._sample.add(torch.cat([rows, error_rows], -1))
        if not self.required.gram:
            return
        self._multiply("gram", columns)
        if input_error is not None:
            if self._weight is None:
                self._multiply("cross", input_error, columns)
            else:
                self._multiply("linear", torch.bmm(input_error[:, 0], self._weight.mT)[:, None], columns)
            if self.required.difference:
                self._multiply("difference", input_error)

    def merge(self, other: SecondMoments) -> None:
        """Adds the statistics of ``other``.

        Raises: CalibrationError if it is of another layer.
        """
        if (other.geometry, other.required) != (self.geometry, self.required):
            raise CalibrationError(f"{other.required} of {other.geometry} cannot join {self.required} of "
                                   f"{self.geometry}")
        if self.held_out is not None and other.held_out is not None:
            self.held_out.merge(other.held_out)
        if self.required.sample_rows and other.rows:
            if self.rows:
                self._sample.merge(other._sample)
            else:
                self._sample = other._sample.moved(next(iter(other._sums.values())).device)
        self.rows += other.rows
        self._carry()
        self._add(other.sums)

    def _columns(self, x: Tensor) -> Tensor:
        """Shape: [groups, blocks, rows, block]."""
        rows = im2col(x.to(self.required.dtype), self.geometry)
        groups, count, width = rows.shape
        block = self.required.block or width
        if width % block:
            raise CalibrationError(f"blocks of {block} do not divide the {width} columns of a layer's input")
        return rows.reshape(groups, count, width // block, block).transpose(1, 2)

    def _sum(self, name: str, dtype: torch.dtype = torch.float64) -> Tensor:
        if name in self._products and name not in self._sums and dtype == self.required.dtype:
            return self._products[name].total
        self._carry()
        if name not in self._sums:
            raise CalibrationError(NO_DATA)
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
            present = self._sums.get(name)
            self._sums[name] = added.to(torch.float64, copy=True) if present is None else present + added.to(present)


class _Products:
    """A sum of products of a few batches; symmetric ones are computed only on and above the diagonal panels.

    Args:
        left: the first left factor.
        right: the first right one, ``None`` for ``left``.

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


def _mirrored(upper: Tensor) -> Tensor:
    """Copies the panels above the diagonal to below it. Changes ``upper``."""
    for begin in range(PANEL, upper.shape[-1], PANEL):
        upper[..., begin : begin + PANEL, :begin] = upper[..., :begin, begin : begin + PANEL].mT
    return upper
