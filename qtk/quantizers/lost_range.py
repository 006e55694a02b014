"""Finds scales that training has made 0, negative or not finite, on accelerators without waiting for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from qtk.errors import EncodingError

EVERY = 16
"""On an accelerator, calls from one look at a scale to the next: a look is four small kernels."""

Arrival: TypeAlias = Callable[[], tuple[float, float] | None]
"""The numbers that were sent to the host, ``None`` as long as they have not arrived."""


def refuse_lost_range(site: str, smallest: float, largest: float, *, late: bool = False) -> None:
    """Raises: EncodingError if a scale is not positive and finite.

    Args:
        site: name of the site.
        smallest: the smallest scale.
        largest: the largest.
        late: whether the scale was seen some steps ago.
    """
    if not (smallest > 0 and largest < torch.inf):
        when = " some steps ago" if late else ""
        raise EncodingError(
            f"{site}: a scale has become {largest if smallest > 0 else smallest:.4g}{when}, but must be positive "
            "and finite; train sim.range_parameters() with a lower learning rate and without weight decay"
        )


def ends(scale: Tensor) -> tuple[float, float]:
    """The smallest and the largest scale; waits for an accelerator."""
    smallest, largest = torch.stack(torch.aminmax(scale)).tolist()
    return smallest, largest


def send_to_host(scale: Tensor) -> Arrival:
    """Starts a copy of the smallest and the largest scale to the host."""
    host = torch.empty(2, dtype=scale.dtype, pin_memory=True)
    host.copy_(torch.stack(torch.aminmax(scale)), non_blocking=True)
    event = torch.Event(device=scale.device)
    event.record()

    def arrived() -> tuple[float, float] | None:
        return (float(host[0]), float(host[1])) if event.query() else None

    return arrived


class DeferredRangeCheck:
    """Looks at a scale every ``EVERY`` calls, and reads what it saw in a later call; copies start anew."""

    def __init__(self) -> None:
        self._calls = 0
        self._arrival: Arrival | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> DeferredRangeCheck:
        return DeferredRangeCheck()

    def __reduce__(self) -> tuple[type[DeferredRangeCheck], tuple[()]]:
        return DeferredRangeCheck, ()

    def check(self, site: str, scale: Tensor) -> None:
        """Raises: EncodingError if a scale that was seen in an earlier call was not positive and finite."""
        seen = None if self._arrival is None else self._arrival()
        if seen is not None:
            self._arrival = None
            refuse_lost_range(site, *seen, late=True)
        if self._arrival is None and self._calls % EVERY == 0:
            self._arrival = send_to_host(scale)
        self._calls += 1
