"""Adds up the differences between a runtime's values and the simulation's, batch by batch."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from qtk.analysis.simulated_values import SimulatedValue
from qtk.numerics.error import decibels
from qtk.report.difference import Difference

MORE_THAN_ONE_STEP = 1.5
"""In steps: quantized values differ by whole ones, up to the rounding of the product with the scale."""

OTHER_CODE = 0.5
"""In steps: more is another code; dynamic scales, and products with them, differ by float rounding."""


class DifferenceSums:
    """The differences of one tensor so far.

    Args:
        name: its name.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.elements = self.differing = self.in_steps = self.beyond = self.other_codes = 0
        self.signal = self.noise = self.max_difference = self.max_steps = 0.0

    def add(self, reference: SimulatedValue, theirs: Tensor) -> None:
        """Adds what counts of one batch. Shape: ``theirs`` as ``reference.value``."""
        ours, theirs, step = reference.value.detach().cpu(), theirs.detach().cpu(), reference.step
        if reference.counted is not None:
            counted = reference.counted.cpu()
            step = None if step is None else step.detach().cpu().expand_as(ours)[counted]
            ours, theirs = ours[counted], theirs[counted]
        difference = absolute_difference(ours, theirs)
        self.elements += difference.numel()
        self.differing += int(difference.count_nonzero())
        self.max_difference = max(self.max_difference, _largest(difference))
        self.signal += float(ours.double().nan_to_num(posinf=0.0, neginf=0.0).square().sum())
        self.noise += float(difference.square().sum())
        if step is not None:
            steps = difference / step.detach().cpu()
            self.in_steps += steps.numel()
            self.beyond += int((steps > MORE_THAN_ONE_STEP).sum())
            self.other_codes += int((steps > OTHER_CODE).sum())
            self.max_steps = max(self.max_steps, _largest(steps))

    def difference(self) -> Difference:
        sqnr_db = decibels(self.signal, self.noise) if math.isfinite(self.noise) else -math.inf
        return Difference(
            self.name, self.elements, self.differing / max(self.elements, 1),
            self.beyond / self.in_steps if self.in_steps else None,
            self.max_difference, self.max_steps if self.in_steps else None, sqnr_db,
            self.other_codes / self.in_steps if self.in_steps else None,
        )

    @classmethod
    def total(cls, parts: Iterable[DifferenceSums], name: str) -> DifferenceSums:
        """The sum over several tensors."""
        total = cls(name)
        for part in parts:
            for field in ("elements", "differing", "in_steps", "beyond", "other_codes", "signal", "noise"):
                setattr(total, field, getattr(total, field) + getattr(part, field))
            total.max_difference = max(total.max_difference, part.max_difference)
            total.max_steps = max(total.max_steps, part.max_steps)
        return total


def absolute_difference(ours: Tensor, theirs: Tensor) -> Tensor:
    """|ours - theirs| in float64; 0 where both are the same, infinite or not a number included, else inf for NaN."""
    ours, theirs = ours.double(), theirs.double()
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    return torch.where(same, 0.0, (ours - theirs).abs().nan_to_num(nan=torch.inf, posinf=torch.inf))


def _largest(values: Tensor) -> float:
    return float(values.max()) if values.numel() else 0.0
