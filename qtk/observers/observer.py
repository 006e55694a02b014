"""The protocol of observers."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor
from typing_extensions import Self


class Observer(Protocol):
    """Collects statistics of one site, tensor by tensor.

    ``count`` elements entered the statistics, ``sentinels`` were left out as attention-mask sentinels.
    """

    @property
    def count(self) -> int: ...

    @property
    def sentinels(self) -> int: ...

    def check(self) -> None:
        """Raises: CalibrationError if NaN or +inf was observed on an accelerator, where ``observe`` does not wait."""

    def observe(self, x: Tensor) -> None:
        """Observes one tensor, without grad.

        Raises: CalibrationError if it holds NaN or +inf; the statistics are as before then. On an accelerator
            ``check`` raises it later.
        """

    def merge(self, other: Self) -> None:
        """Adds the statistics of ``other``, as if it had been observed here next.

        Raises: CalibrationError if ``other`` observes another way.
        """
