"""Exponential average of each batch's minimum and maximum."""

from __future__ import annotations

import torch
from torch import Tensor

from qtk.core.granularity import Granularity
from qtk.errors import CalibrationError
from qtk.observers.extremes import Counted, extremes
from qtk.observers.min_max import same_shape


class MovingAverage(Counted):
    """``state ← state + momentum · (batch - state)`` of both extremes; the first batch initializes
    the state.

    The first batch and its remaining weight are kept too, so that merging two averages gives exactly the average over
    the batches of the first, then the batches of the second.

    Args:
        momentum: weight of the newest batch, 0 < momentum ≤ 1.

    Raises: CalibrationError if ``momentum`` is not in (0, 1].
    """

    def __init__(self, granularity: Granularity, *, momentum: float = 0.1) -> None:
        if not 0 < momentum <= 1:
            raise CalibrationError(f"momentum must be more than 0 and at most 1, got {momentum}")
        super().__init__()
        self.granularity = granularity
        self.momentum = momentum
        # [low and high, *qparam shape]; NaN for a scale that saw no value yet
        self._first: Tensor | None = None
        self._state: Tensor | None = None
        self._decay: Tensor | None = None  # [*qparam shape]: (1 - momentum) ^ batches seen

    @property
    def minimum(self) -> Tensor | None:
        """The averaged minimum, ``None`` until something was seen; NaN for a scale that saw only sentinels.

        Shape: float32 in the qparam shape.
        """
        return None if self._state is None else self._state[0].clone()

    @property
    def maximum(self) -> Tensor | None:
        """The averaged maximum; as ``minimum``."""
        return None if self._state is None else self._state[1].clone()

    @torch.no_grad()
    def observe(self, x: Tensor) -> None:
        """Observes one tensor. Raises: CalibrationError if it holds NaN or +inf, or has another number of channels."""
        found = extremes(x, self.granularity, allows_mask=self.allows_mask, finds_mask=self.finds_mask)
        if found is None:
            return
        if not found.nothing:
            batch = torch.stack((found.low, found.high))
            decay = torch.full_like(found.low, 1 - self.momentum)
            if found.seen is not None:
                batch, decay = batch.where(found.seen, torch.nan), decay.where(found.seen, 1.0)
            self._follow(batch, batch, decay)
        self._add(found)

    def merge(self, other: MovingAverage) -> None:
        """Adds the statistics of ``other``, as if its batches had been observed next.

        Raises: CalibrationError if its granularity or momentum differs.
        """
        if (other.granularity, other.momentum) != (self.granularity, self.momentum):
            raise CalibrationError(
                f"an average {other.granularity} with momentum {other.momentum} cannot join one {self.granularity} "
                f"with momentum {self.momentum}"
            )
        if other._first is not None and other._state is not None and other._decay is not None:
            self._follow(other._first, other._state, other._decay)
        self._add_all(other)

    def _follow(self, first: Tensor, state: Tensor, decay: Tensor) -> None:
        """Appends batches whose own average is ``state``.

        Their first batch initialized that average; after earlier batches it has weight ``momentum`` instead, and the
        earlier average the rest of its weight: ``state + decay · (earlier - first)``.
        """
        if self._first is None or self._state is None or self._decay is None:
            self._first, self._state, self._decay = first, state, decay
            return
        same_shape(self._decay.shape, decay.shape)
        earlier_first, earlier_state = self._first.to(first.device), self._state.to(first.device)
        joined = state + decay * (earlier_state - first)
        self._state = torch.where(earlier_state.isnan(), state, torch.where(state.isnan(), earlier_state, joined))
        self._first = torch.where(earlier_first.isnan(), first, earlier_first)
        self._decay = self._decay.to(first.device) * decay
