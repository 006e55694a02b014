"""Defers Ctrl-C while the body of a ``with`` statement runs."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Defers an interrupt that arrives while the body runs until it has ended."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread is ever interrupted
        yield
        return
    deferred: list[int] = []
    previous = signal.getsignal(signal.SIGINT)
    if previous is None:  # not Python's to put back
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: deferred.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if deferred and previous is not signal.SIG_IGN:
            signal.raise_signal(signal.SIGINT)
