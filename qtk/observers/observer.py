"""What every observer does, and which values none of them counts."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from qtk.errors import CalibrationError

SENTINEL = -1e30
"""Values down here (−inf, finfo.min) mark masked places; they are no measurement."""


class Observer(Protocol):
    """Collects statistics of one site, tensor by tensor.

    ``count`` elements entered the statistics, ``sentinels`` were left out as mask marks.
    """

    count: int
    sentinels: int

    def observe(self, x: Tensor) -> None:
        """Takes one tensor in. Raises: CalibrationError if it holds NaN or +inf."""
        ...


def sentinel_bound(dtype: torch.dtype) -> float:
    """Values ≤ this are sentinels; in float16 that is its own smallest number."""
    return max(SENTINEL, torch.finfo(dtype).min)


def refuse_broken(maximum: Tensor) -> None:
    """Raises: CalibrationError if a maximum shows that NaN or +inf went in."""
    if not bool(torch.isfinite(maximum).all()):
        kind = "NaN" if bool(torch.isnan(maximum).any()) else "+inf"
        raise CalibrationError(f"the tensor holds {kind}; clean the data, or find the layer that produces it")
