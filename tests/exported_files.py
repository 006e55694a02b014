"""Exports run their files in ONNX Runtime; most tests of exports do so themselves and look closer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from qtk.workflow import export

RUN = export._run
"""What an export runs its files by."""


@contextmanager
def not_run() -> Iterator[None]:
    """Exports write and read back, and run nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "_run", lambda *_: None)
        yield
