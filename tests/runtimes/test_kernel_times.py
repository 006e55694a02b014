"""The time of kernels in ONNX Runtime: those that compute count, and what dequantizes for them."""

import pytest
import torch
from torch import nn

import qtk

pytest.importorskip("onnxruntime")

from qtk.runtimes import kernel_times


def exported(model, x, folder, rules=()):
    sim = qtk.QuantSim(model.eval(), x, config={"version": 1, "extends": "default", "rules": list(rules)})
    sim.compute_encodings([x], progress=False)
    sim.export(folder, formats=["onnx"])
    return folder / "model.onnx"


@pytest.fixture
def medians(monkeypatch):
    """The times that a median was taken of, of which each is 1 ms."""
    listed = []
    monkeypatch.setattr(kernel_times.statistics, "median", lambda times: listed.append(times) or 1.0)
    return listed


@pytest.mark.medium
def test_kernels_that_compute_count_and_those_at_inputs_and_outputs_do_not(tmp_path, medians):
    x = torch.randn(16, 64)
    file = exported(nn.Linear(64, 8), x, tmp_path / "out")
    assert kernel_times.computing_ms(file, [x], turns=5) == 1.0
    assert [len(times) for times in medians] == [5]  # one QGemm, without the first run
    assert all(time > 0 for times in medians for time in times)


@pytest.mark.medium
def test_codes_that_a_float_product_reads_are_dequantized_by_it(tmp_path, medians):
    x = torch.randn(16, 64)
    file = exported(nn.Linear(64, 8), x, tmp_path / "out", rules=[{"match": {"op": "linear"}, "weight": "float"}])
    assert kernel_times.computing_ms(file, [x], turns=5) == 3.0  # DequantizeLinear, Max (which keeps it apart), Gemm
    assert [len(times) for times in medians] == [5, 5, 5]
