"""``qtk::observe``: passes a tensor to an observer from inside a compiled graph.

An observer is a Python object with data-dependent control flow, which cannot be compiled. The op is opaque: it looks
up its listener by number, and counts its calls in the mutated argument ``ticket``, so that no compiler removes it as
dead code.
"""

from __future__ import annotations

import itertools
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from qtk.errors import CalibrationError
from qtk.ops.registration import nothing, register


class Observes(Protocol):
    """An object that observes tensors."""

    def observe(self, x: Tensor) -> None: ...


ObservesT = TypeVar("ObservesT", bound=Observes)


class Listener(Generic[ObservesT]):
    """Holds the observer of one site and makes it reachable from compiled code.

    A copy has its own number and a copy of the observer.

    Args:
        place: name of the site, for messages.
    """

    def __init__(self, place: str, observer: ObservesT | None = None) -> None:
        self.place = place
        self.observer = observer
        self.number = next(_NUMBERS)
        self.ticket = torch.zeros(1, dtype=torch.int64, device="cpu")
        _ADDRESSES[self.number] = self

    def observe(self, x: Tensor) -> None:
        """Passes ``x`` to the observer.

        Raises: CalibrationError, with the site, if there is no observer or it refuses ``x``.
        """
        if self.observer is None:
            raise CalibrationError(f"{self.place} is in OBSERVE but has no observer; set quantizer.observer first")
        try:
            self.observer.observe(x)
        except CalibrationError as error:
            raise CalibrationError(f"{self.place}: {error}") from None

    def observe_when_run(self, x: Tensor) -> None:
        """Adds a call of ``observe`` to the graph that is being compiled."""
        _OP(self.ticket, x.detach(), self.number)

    def __reduce__(self) -> tuple[type[Listener[ObservesT]], tuple[str, ObservesT | None]]:
        return Listener, (self.place, self.observer)


_NUMBERS = itertools.count()
_ADDRESSES: WeakValueDictionary[int, Listener[Any]] = WeakValueDictionary()


def _observe(ticket: Tensor, input: Tensor, listener: int) -> None:
    _ADDRESSES[listener].observe(input)
    ticket.add_(1)


_OP = register("observe(Tensor(a!) ticket, Tensor input, int listener) -> ()", _observe, nothing)
