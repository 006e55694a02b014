"""Which data a layer-wise run holds out from its methods, to judge their results by."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch  # noqa: F401  the examples use it
from torch import Tensor

from qtk.errors import CalibrationError


@dataclass(frozen=True, slots=True)
class Holdout:
    """The last ``fraction`` of every batch, or whole batches.

    Of batches too small to be split, so many are held out whole.

    Args:
        fraction: of the data.
        batches: indices of the batches to hold out; ``None``: a part of each.

    >>> Holdout(0.2).kept(64, batch=0), Holdout(0.2).kept(1, batch=3), Holdout(0.2).kept(1, batch=4)
    (51, 1, 0)
    """

    fraction: float
    batches: frozenset[int] | None = None

    def kept(self, length: int, batch: int) -> int:
        """Says how many of the ``length`` samples of a batch are not held out: the first."""
        if self.batches is not None:
            return 0 if batch in self.batches else length
        count = round(self.fraction * length)
        if 0 < count < length:
            return length - count
        held_out = [int(self.fraction * number + 1e-9) for number in (batch, batch + 1)]  # of so many batches
        return 0 if held_out[1] > held_out[0] else length

    def split(self, x: Tensor, batch: int, samples: int | None = None, axes: int = 1) -> tuple[Tensor, Tensor]:
        """The samples that are kept, and the samples held out.

        Args:
            x: a value of the batch.
            batch: its index.
            samples: how many samples the batch has; ``None``: the first axis of ``x`` counts them. They are taken to be
                along the first axis of this length, else the outer part of the first axis.
            axes: how many leading axes of ``x`` the axis of samples is searched among.

        Shape: as ``x``, but the axis of samples.

        >>> kept, held_out = Holdout(0.5).split(torch.zeros(3, 4, 8), 0, samples=4, axes=2)
        >>> kept.shape, held_out.shape
        (torch.Size([3, 2, 8]), torch.Size([3, 2, 8]))
        """
        axis, each, count = 0, 1, len(x)
        if samples and samples in x.shape[:axes]:
            axis, count = list(x.shape).index(samples), samples
        elif samples and count % samples == 0:
            each, count = count // samples, samples
        kept = each * self.kept(count, batch)
        return x.narrow(axis, 0, kept), x.narrow(axis, kept, x.shape[axis] - kept)


def holdout_of(
    fraction: float, groups: Sequence[Hashable] | None, num_batches: int, every_label: Sequence[Hashable] | None = None
) -> Holdout | None:
    """The samples to hold out; with ``groups``, one label for each batch, all batches of some of the labels.

    Args:
        fraction: of the data, or of the labels.
        groups: the labels of the batches.
        num_batches: how many there are.
        every_label: the labels of the batches of all ranks, in the same order on all, so that all hold out the same;
            ``None``: ``groups``.

    Raises: CalibrationError if ``fraction`` is not in [0, 1), or for labels of which none can be held out.

    >>> holdout_of(0.2, ["cat", "cat", "dog"], 3)
    Holdout(fraction=0.2, batches=frozenset({2}))
    """
    if not 0 <= fraction < 1:
        raise CalibrationError(f"holdout is a fraction of the data, at least 0 and below 1, got {fraction}")
    if groups is None:
        return Holdout(fraction) if fraction else None
    if not fraction:
        raise CalibrationError("groups say which data to hold out together, and holdout=0 holds out none; "
                               "leave out one of them")
    labels = list(dict.fromkeys(groups if every_label is None else every_label))
    if len(groups) != num_batches or len(labels) < 2:
        raise CalibrationError(f"groups needs a label for each of the {num_batches} calls of the model, of at least 2 "
                               f"kinds; got {len(groups)} labels of {len(labels)} kinds")
    count = min(len(labels) - 1, max(1, round(fraction * len(labels))))
    held_out = set(labels[-count:])
    return Holdout(fraction, frozenset(index for index, label in enumerate(groups) if label in held_out))
