"""A short training set for programs of the documentation: they run as they stand, train little and time nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest

from qtk.demo import digits
from qtk.workflow import verify_export

IMAGES = 96


@contextmanager
def short_digits() -> Iterator[None]:
    """Lets ``load_digits_split`` return the first images alone, and ``verify_export`` leave latency out."""
    with pytest.MonkeyPatch.context() as patch:
        split = digits.load_digits_split()
        short = digits.DigitsSplit(*(part[:IMAGES] for part in split))
        patch.setattr(digits, "load_digits_split", lambda: short)
        patch.setattr(verify_export._Witness, "measure", lambda *_, **__: None)
        yield


def digits_of(config: pytest.Config) -> AbstractContextManager[None]:
    """The digits of a door: short but behind the last one, where programs must show what the page says."""
    return nullcontext() if config.getoption("door") == "all" else short_digits()
