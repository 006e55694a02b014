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
from dataclasses import replace

import torch
from torch import Tensor

from qtk.errors import CalibrationError
from qtk.moments.gram_products import GramProducts, mirrored
from qtk.moments.matrix_rows import MatrixRows
from qtk.moments.required_statistics import RequiredStatistics
from qtk.numerics.im2col import Geometry, im2col
from qtk.observers.row_sample import RowSample

NO_DATA = "no data was observed; calibrate with data that reaches this layer"

ELEMENTS_AT_ONCE = 1 << 24
"""Largest number of elements in im2col layout held at a time, but at least one sample."""

CARRIED = 16
"""Number of batches summed in the dtype of their products before the sum is added in float64."""


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
        self._products: dict[str, GramProducts] = {}
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
        """All sums so far, float64, by name; the sums of two sets of samples add up to the sums of both."""
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
            weight: w, [groups, outputs, columns]; the weight of the layer, if one was given.
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
        """``gram`` in another dtype; in the dtype of the products without converting to float64, if possible.

        Raises: CalibrationError as ``gram``.
        """
        gram = self._sum("gram", dtype)
        if not bool(gram.diagonal(dim1=-2, dim2=-1).isfinite().all()):  # it bounds the rest
            raise CalibrationError("the squares of a layer's input are beyond float32; scale the data down")
        return mirrored(gram)

    @property
    def difference(self) -> Tensor | None:
        """D, ``None`` where both inputs were one or it was not required. Shape: as ``gram``."""
        return mirrored(self._sum("difference")) if self.has_two_inputs and self.required.difference else None

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
        return self._sum("sum").flatten(1) / self.rows_of_means

    @property
    def mean_difference(self) -> Tensor | None:
        """Mean of X - X̂ over rows, ``None`` where both inputs were one. Shape: float64 [groups, columns]."""
        return self._sum("error_sum").flatten(1) / self.rows_of_means if self.has_two_inputs else None

    @property
    def counts(self) -> tuple[int, ...] | None:
        """Rows that each matrix of a stack has seen, but rows of zeros; ``None`` of other layers."""
        return tuple(int(count) for count in self._sums["counts"]) if "counts" in self._sums else None

    @property
    def rows_of_groups(self) -> int | Tensor:
        """Rows behind the Gram matrix of each group. Shape: [groups, 1], or one number for all."""
        counts = self._sums.get("support", self._sums.get("counts"))  # support: of pooled statistics
        return self.rows if counts is None else counts[:, None]

    @property
    def rows_of_means(self) -> int | Tensor:
        """Rows that each group has met. Shape: [groups, 1], or one number for all."""
        counts = self._sums.get("counts")
        return self.rows if counts is None else counts[:, None].clamp(min=1)

    @property
    def rows_of_all(self) -> int:
        """Rows seen, held-out rows included."""
        return self.rows + (0 if self.held_out is None else self.held_out.rows)

    @property
    def columns(self) -> int:
        """Number of columns of one group; 0 before the first batch."""
        total = self._sums.get("sum")
        return 0 if total is None else total.shape[1] * total.shape[2]

    @property
    def has_two_inputs(self) -> bool:
        """Says whether X was ever given beside X̂."""
        return "error_sum" in self._sums

    @property
    def _has_weight_product(self) -> bool:
        """Says whether ``wᵀ E`` is summed, not E."""
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
        _check_finite(quantized, float_input, *(held_out or ()))
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

    @torch.no_grad()
    def observe_matrices(self, quantized: MatrixRows, float_input: MatrixRows | None = None, batch: int = 0) -> None:
        """Adds one batch of the rows of each matrix of a stack, of which the last ones of each are held out.

        X counts where it meets the same matrices as X̂ row by row; elsewhere X̂ is taken for it.

        Raises: CalibrationError as ``observe``.
        """
        if float_input is not None and not quantized.meets_as(float_input):
            float_input = None
        _check_finite(quantized.rows, None if float_input is None else float_input.rows)
        if self.held_out is not None and self.required.holdout is not None:
            quantized, rest = quantized.split(self.required.holdout, batch)
            other = None
            if float_input is not None:
                float_input, other = float_input.split(self.required.holdout, batch)
            self.held_out.observe_matrices(rest, other)
        if not len(quantized.rows):
            return
        self.rows += len(quantized.rows)
        self._add({"counts": torch.stack([x.any(-1).sum() for x in quantized]).to(torch.float64)})
        pairs = zip(quantized, [None] * self.geometry.groups if float_input is None else float_input, strict=True)
        self._observe_groups([None if not len(x) else (x, float_x) for x, float_x in pairs])

    def of_matrix(self, index: int) -> SecondMoments:
        """The statistics of one matrix of a stack, as of a layer of its own."""
        sums = {name: total[index:index + 1] for name, total in self.sums.items()}
        counts = self.counts
        assert counts is not None
        alone = SecondMoments.of_sums(
            replace(self.geometry, groups=1), self.required, counts[index], sums, RowSample(0)
        )
        if self.held_out is not None and self.held_out.rows:
            alone.held_out = self.held_out.of_matrix(index)
        return alone

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
        self.rows += self._observe_groups([(quantized, float_input)])

    def _observe_groups(self, groups: Sequence[tuple[Tensor, Tensor | None] | None]) -> int:
        """Adds X̂ and X of all groups together, or of the groups one by one, ``None`` for groups without any.

        Returns: how many rows the last one had.
        """
        rows, sums = 0, dict[str, list[Tensor | None]]()
        for index, pair in enumerate(groups):
            if pair is None:
                for known in sums.values():
                    known.append(None)
                continue
            columns = self._columns(pair[0])
            input_error = None if pair[1] is None else self._columns(pair[1]) - columns
            rows = columns.shape[2]
            added = {"sum": columns.sum(2)} | ({} if input_error is None else {"error_sum": input_error.sum(2)})
            for name, each in added.items():
                sums.setdefault(name, [None] * index).append(each)
            self._sample_rows(columns, input_error)
            if self.required.gram:
                self._multiply_all(columns, input_error, index)
        self._add({name: _stacked(each) for name, each in sums.items()})
        for name, products in list(self._products.items()):
            products.batches += 1
            if products.batches == CARRIED:
                self._add({name: self._products.pop(name).total})
        return rows

    def _sample_rows(self, columns: Tensor, input_error: Tensor | None) -> None:
        if self.required.sample_rows:
            rows = columns.transpose(1, 2).flatten(2)
            error_rows = torch.zeros_like(rows) if input_error is None else input_error.transpose(1, 2).flatten(2)
            self._sample.add(torch.cat([rows, error_rows], -1))

    def _multiply_all(self, columns: Tensor, input_error: Tensor | None, group: int) -> None:
        self._multiply("gram", group, columns)
        if input_error is not None:
            if self._weight is None:
                self._multiply("cross", group, input_error, columns)
            else:
                self._multiply("linear", group, torch.bmm(input_error[:, 0], self._weight.mT)[:, None], columns)
            if self.required.difference:
                self._multiply("difference", group, input_error)

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

    def _multiply(self, name: str, group: int, left: Tensor, right: Tensor | None = None) -> None:
        if name not in self._products:
            self._products[name] = GramProducts(left, right, self.geometry.groups)
        self._products[name].add(left, right, group)

    def _carry(self) -> None:
        for name in list(self._products):
            self._add({name: self._products.pop(name).total})

    def _add(self, sums: Mapping[str, Tensor]) -> None:
        for name, added in sums.items():
            present = self._sums.get(name)
            self._sums[name] = added.to(torch.float64, copy=True) if present is None else present + added.to(present)


def takes_less_with_weight(outputs: int, columns: int) -> bool:
    """Says whether ``wᵀ E`` of a weight [outputs, columns] takes less to sum than E."""
    return 2 * outputs <= columns


def _check_finite(*inputs: Tensor | None) -> None:
    if not all(bool(x.sum(dtype=torch.float32).isfinite()) for x in inputs if x is not None):
        raise CalibrationError("NaN or infinity in the input of a layer; clean the data")


def _stacked(sums: Sequence[Tensor | None]) -> Tensor:
    """The sums of groups as one tensor, 0 for groups without any."""
    known = next(each for each in sums if each is not None)
    return torch.cat([torch.zeros_like(known) if each is None else each for each in sums])
