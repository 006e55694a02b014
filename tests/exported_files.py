"""Exports run their files in ONNX Runtime; most tests of exports do so themselves and look closer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch import Tensor, nn

from qtk import QuantSim
from qtk.export.onnx import qdq
from qtk.report.verdict import OFF
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


def check_near_float_and_file(sim: QuantSim, model: nn.Module, inputs: Tensor, folder: Path) -> None:
    """A simulation is more than 28 dB near its float model, and its file in ONNX Runtime computes the simulation."""
    expected = model(inputs)
    error = (sim.model(inputs) - expected).square().sum() / expected.square().sum()
    assert -10 * error.log10() > 28
    sim.export(folder, formats=("onnx",), progress=False)
    verdict = sim.verify_export(folder, [inputs], turns=0, progress=False)
    assert verdict.run(OFF).sqnr_db > 60
    assert verdict.findings == ()
