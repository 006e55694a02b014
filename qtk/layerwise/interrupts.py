"""Ctrl-C that waits until what must not be half done is done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Holds an interrupt back while the body runs, and lets it through afterwards."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread is ever interrupted
        yield
        return
    waiting: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    if before is None:  # not Python's to put back
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: waiting.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if waiting and before is not signal.SIG_IGN:
            signal.raise_signal(signal.SIGINT)
