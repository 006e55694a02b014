"""Tensors that are observed at the same time: on a GPU those that are alike share a launch."""

from __future__ import annotations

import torch
from torch import Tensor

from qtk.kernels.backends import shares_launches
from qtk.observers.extremes import Running, add_to_all
from qtk.observers.min_max import MinMax
from qtk.observers.observer import Observer


class Together:
    """Observations of which some wait for others; ``finish`` makes those that do.

    >>> from qtk.core.granularity import PerTensor
    >>> observer, together = MinMax(PerTensor()), Together()
    >>> together.observe(observer, torch.tensor([1.0, -2.0]))
    >>> together.finish()
    >>> observer.minimum
    tensor([-2.])
    """

    def __init__(self) -> None:
        self._waiting: dict[torch.device, list[tuple[MinMax, Tensor]]] = {}

    def observe(self, observer: Observer, x: Tensor) -> None:
        """Observes a tensor now or with others. Raises: as ``observer.observe``."""
        if type(observer) is MinMax and observer.is_new and x.numel() and shares_launches(x.device):
            observer.granularity.qparam_shape(tuple(x.shape))  # raises a SpecError if it does not fit
            self._waiting.setdefault(x.device, []).append((observer, x))
        else:
            observer.observe(x)

    @torch.no_grad()
    def finish(self) -> None:
        """Observes all that waits."""
        for waiting in self._waiting.values():
            observers, xs = [observer for observer, _ in waiting], [x for _, x in waiting]
            granularities = [observer.granularity for observer in observers]
            runnings = Running.empty_for(xs, granularities)
            for observer, running in zip(observers, runnings, strict=True):
                observer.begin(running)
            add_to_all(runnings, xs, granularities, [observer.allows_mask for observer in observers])
        self._waiting.clear()
