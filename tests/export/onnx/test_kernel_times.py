"""The time of kernels in ONNX Runtime: those that compute count, quantizing ones do not."""

import pytest
import torch
from torch import nn

import qtk

pytest.importorskip("onnxruntime")

from qtk.export.onnx import kernel_times


def exported(model, x, folder):
    sim = qtk.QuantSim(model.eval(), x)
    sim.compute_encodings([x], progress=False)
    sim.export(folder, formats=["onnx"])
    return folder / "model.onnx"


def test_kernels_that_compute_count_and_those_that_quantize_do_not(tmp_path, monkeypatch):
    x = torch.randn(16, 64)
    file, listed = exported(nn.Linear(64, 8), x, tmp_path / "out"), []
    monkeypatch.setattr(kernel_times.statistics, "median", lambda times: listed.append(times) or 1.0)
    assert kernel_times.computing_ms(file, [x], turns=5) == 1.0
    assert [len(times) for times in listed] == [5]  # one QGemm, without the first run
    monkeypatch.setattr(kernel_times, "CONVERTING", frozenset())
    assert kernel_times.computing_ms(file, [x], turns=5) == 3.0
    assert all(time > 0 for times in listed for time in times)
