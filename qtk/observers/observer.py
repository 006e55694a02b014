"""The protocol of observers."""

from __future__ import annotations

from typing import Protocol, TypeVar

from torch import Tensor

Self = TypeVar("Self", bound="Observer")


class Observer(Protocol):
    """Collects statistics of one site, tensor by tensor.

    ``count`` elements entered the statistics, ``sentinels`` were left out as attention-mask sentinels. Without
    ``allows_mask`` few sentinels are refused; with ``finds_mask`` finite numbers of a mask count as sentinels.
    """

    allows_mask: bool
    finds_mask: bool

    @property
    def count(self) -> int: ...

    @property
    def sentinels(self) -> int: ...

    def check(self) -> None:
        """Raises: CalibrationError if NaN or +inf was observed on an accelerator, where ``observe`` does not sync."""

    def observe(self, x: Tensor) -> None:
        """Observes one tensor, without grad.

        Raises: CalibrationError if it holds NaN or +inf, the statistics unchanged; on an accelerator ``check`` raises
            it later.
        """

    def merge(self: Self, other: Self) -> None:
        """Adds the statistics of ``other``, as if its tensors had been observed next.

        Raises: CalibrationError if ``other`` has other settings.
        """
