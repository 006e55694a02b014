"""Minimises the quantization error over shrunk copies of the observed range."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qtk.calibrators.search import Sampled, least_error, sampler
from qtk.core.bounds import check_count
from qtk.core.encoding import Encoding
from qtk.core.granularity import Granularity
from qtk.core.spec import QuantSpec
from qtk.errors import CalibrationError
from qtk.numerics.ranges import covering_range
from qtk.observers.observer import Observer
from qtk.public import public

MOST_NORM = 100
MOST_STEPS = 10_000


@public
@dataclass(frozen=True, slots=True)
class Mse:
    """Minimises ``Σ |x - x̂|^norm`` over ``i/steps`` times the observed range, i = 1…steps.

    The error of a weight is summed over its elements, the error of an activation over the middles of histogram bins.

    Args:
        norm: 2, the squared error; other norms (BRECQ's and QDrop's 2.4) take longer.
        steps: number of ranges tried.
        bins: smallest number of histogram bins over the range of an activation.

    Raises: CalibrationError if ``norm`` is not above 0 and at most 100, or ``steps`` not 1 to 10,000.
    """

    norm: float = 2.0
    steps: int = 100
    bins: int = 1024

    def __post_init__(self) -> None:
        if not 0 < self.norm <= MOST_NORM:
            raise CalibrationError(f"mse needs 0 < norm ≤ {MOST_NORM}, got norm {self.norm}")
        check_count("steps of mse", self.steps, MOST_STEPS)

    def observer(self, granularity: Granularity, *, static: bool = False) -> Sampled:
        return sampler(granularity, static=static, bins=self.bins)

    def encodings(self, observers: Sequence[Observer], specs: Sequence[QuantSpec]) -> list[Encoding]:
        """The encodings of least error. Raises: CalibrationError if a scale saw nothing."""
        return least_error(observers, specs, self._propose, norm=self.norm)

    def _propose(self, low: Tensor, high: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor | None]:
        fraction = torch.arange(1, self.steps + 1, dtype=torch.float64, device=low.device)[:, None] / self.steps
        return covering_range(low * fraction, high * fraction, spec)
