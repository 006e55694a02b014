"""Which backends are in use, and the reasons why others are not."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

import qtk
from qtk.kernels import backends
from qtk.kernels.backends import DISABLE, DISABLE_TRITON, load_native, triton_unavailable


@pytest.fixture
def with_gpu(monkeypatch):
    """torch says that there is a GPU; Triton is there."""
    monkeypatch.delenv(DISABLE_TRITON, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    triton_unavailable.cache_clear()
    yield monkeypatch
    triton_unavailable.cache_clear()


@pytest.mark.medium
@pytest.mark.skipif(load_native() is not None, reason=f"C++ kernels: {load_native()}")
def test_it_can_be_switched_off():
    code = ("import qtk, torch; from qtk.ops.fake_quantize import fake_quantize; print(qtk.backends()['cpu']);"
            "x = torch.tensor([0.3, 9.0], requires_grad=True); y = fake_quantize(x, torch.ones(1), None, [], -8, 7);"
            "y.sum().backward(); print(y.tolist(), x.grad.tolist())")
    run = subprocess.run([sys.executable, "-c", code], env={**os.environ, DISABLE: "1"}, capture_output=True, text=True,
                         check=True)
    assert run.stdout.splitlines() == [f"reference; C++ kernels switched off by {DISABLE}", "[0.0, 7.0] [1.0, 0.0]"]
    assert qtk.backends()["cpu"] == "C++ kernels"


@pytest.mark.parametrize("value", ["", "0", "1", "yes"])
def test_a_variable_that_is_0_or_empty_switches_nothing_off(value, monkeypatch, tmp_path):
    monkeypatch.setattr(backends, "LIBRARY", tmp_path / "nothing.so")
    monkeypatch.setenv(DISABLE, value)
    reason = load_native.__wrapped__()
    assert reason.startswith("not built; run qtk build-kernels" if value in ("", "0") else f"switched off by {DISABLE}")


def test_a_library_that_does_not_load_gives_the_reason(monkeypatch, tmp_path):
    library = tmp_path / "broken.so"
    library.write_text("no library")
    monkeypatch.setattr(backends, "LIBRARY", library)
    monkeypatch.delenv(DISABLE, raising=False)
    reason = load_native.__wrapped__()
    assert reason.startswith(f"built for another torch than {torch.__version__}, run qtk build-kernels: ")
    assert str(library) in reason
    assert "\n" not in reason


def test_triton_runs_where_a_gpu_is(with_gpu):
    assert triton_unavailable() is None
    assert qtk.backends()["cuda"] == "Triton kernels"


def test_triton_that_is_missing_or_switched_off_says_why(with_gpu):
    with_gpu.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else object())
    assert qtk.backends()["cuda"] == "reference; Triton kernels not there; run pip install triton"
    triton_unavailable.cache_clear()
    with_gpu.setattr(torch.cuda, "is_available", lambda: False)
    assert qtk.backends()["cuda"] == "reference; Triton kernels wait for a GPU"
    triton_unavailable.cache_clear()
    with_gpu.setenv(DISABLE_TRITON, "1")
    assert qtk.backends()["cuda"] == f"reference; Triton kernels switched off by {DISABLE_TRITON}"
