"""The lock that keeps captures of several threads apart, and the limit of the time that a trace may take.

Torch derives a bound for each expression of symbolic sizes, and each reshape of an axis that was rolled, padded or cut
into windows makes the expressions longer: of a Swin V2 with three blocks the capture with every axis free takes 25
times as long as with a free batch, of most models 1 to 2 times.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Iterator

from qtk.torch_private import checking_sizes

TRACING = threading.RLock()
"""Held while a model is traced, and while a simulation is run over data.

``torch.export`` and ``torch.fx`` patch torch for the whole process while they trace, and ``is_compiling()`` is then
true in every thread: two captures at once disturb each other, and a quantizer that runs meanwhile would not observe.
"""

FLOOR_S = 20.0
"""Seconds of computing that freeing every axis may always take: captures of models with up to some dozen layers, which
take 2 to 9 s so, and half as long again on a loaded machine, end in it."""

TIMES = 5.0
"""How many times as long as the capture with a free batch it may take in large models; between the 1 to 2 of models
that profit and the 25 of models that do not end in time."""


CHECKED_S = 0.02
"""Seconds between two looks at the time of the thread, a system call, of which each size that a tracer evaluates would
make one: 40,000 in a model of two layers."""


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """No garbage collection looks through the million objects of a trace in the body: a tenth of its time.

    A run of a model is none: what it computes may hang in cycles until it is collected.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class OutOfTime(BaseException):
    """A trace has reached its limit; a ``BaseException``, so that torch and the model's code do not catch it."""


@contextlib.contextmanager
def tracing_for(seconds: float | None) -> Iterator[None]:
    """Ends traces of this thread once it has computed for so long; other threads' load does not count.

    Raises: OutOfTime.
    """
    if seconds is None:
        yield
        return
    deadline, due = time.thread_time() + seconds, 0.0

    def check() -> None:
        nonlocal due
        if (now := time.perf_counter()) > due:
            due = now + CHECKED_S
            if time.thread_time() > deadline:
                raise OutOfTime

    with checking_sizes(check):
        yield
