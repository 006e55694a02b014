"""Exports run their files in ONNX Runtime; most tests of exports do so themselves and look closer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from qtk.export.onnx import qdq
from qtk.workflow import export

RUN = export._run
"""What an export runs its files by."""


@contextmanager
def not_run() -> Iterator[None]:
    """Exports write and read back, and run nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "_run", lambda *_: None)
        yield


def leave_out(patch: pytest.MonkeyPatch, name: str) -> None:
    """ONNX files are written without one of the rewrites for ONNX Runtime."""
    passes = {stage: getattr(qdq, stage) for stage in ("BEFORE_SITES_ARE_LISTED", "AFTER_SITES_ARE_LISTED")}
    assert name in {each.name for stage in passes.values() for each in stage}
    for stage, listed in passes.items():
        patch.setattr(qdq, stage, tuple(each for each in listed if each.name != name))
