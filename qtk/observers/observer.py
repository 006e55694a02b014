"""What every observer does."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor
from typing_extensions import Self


class Observer(Protocol):
    """Collects statistics of one site, tensor by tensor.

    ``count`` elements entered the statistics, ``sentinels`` were left out as mask marks.
    """

    count: int
    sentinels: int

    def observe(self, x: Tensor) -> None:
        """Takes one tensor in; runs without grad by itself.

        Raises: CalibrationError if it holds NaN or +inf; the statistics are as before then.
        """

    def merge(self, other: Self) -> None:
        """Takes in what ``other`` has seen, as if it had been observed here next.

        Raises: CalibrationError if ``other`` observes another way.
        """
