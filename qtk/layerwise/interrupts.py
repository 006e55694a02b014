"""Defers Ctrl-C while the body of a ``with`` statement runs."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Defers Ctrl-C until the body has ended; does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread is ever interrupted
        yield
        return
    deferred: list[int] = []
    previous = signal.getsignal(signal.SIGINT)
    if previous is None:  # installed outside Python, which could not restore it
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: deferred.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if deferred and previous is not signal.SIG_IGN:
            signal.raise_signal(signal.SIGINT)
