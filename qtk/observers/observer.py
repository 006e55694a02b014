"""What every observer does."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor
from typing_extensions import Self


class Observer(Protocol):
    """Collects statistics of one site, tensor by tensor.

    ``count`` elements entered the statistics, ``sentinels`` were left out as mask marks.
    """

    @property
    def count(self) -> int: ...

    @property
    def sentinels(self) -> int: ...

    def check(self) -> None:
        """Raises: CalibrationError if it was shown NaN or +inf on a device on which ``observe`` does not look."""

    def observe(self, x: Tensor) -> None:
        """Takes one tensor in; runs without grad by itself.

        Raises: CalibrationError if it holds NaN or +inf; the statistics are as before then. On an accelerator
            ``check`` raises it later.
        """

    def merge(self, other: Self) -> None:
        """Takes in what ``other`` has seen, as if it had been observed here next.

        Raises: CalibrationError if ``other`` observes another way.
        """
