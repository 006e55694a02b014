"""The kernels as they are compiled for GPUs: their PTX, run by the emulator of ``tests/ptx``, against the reference.

These are the tests that Triton's interpreter passes, run again with the machine's instructions in its place: layouts,
exchanges between threads, barriers, widths of accesses, masks and rounding are those of a GPU. What launches kernels
takes the path that it takes before a GPU. To run any test so: ``QTK_EMULATE_GPU=90 pytest FILE``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.kernels(canary=True),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the tests themselves run on the GPU"),
]
ROOT = Path(__file__).parents[3]
QUICK, SLOW = "90", ("80", "100")
"""Compute capabilities: of an H200; of an A100 and a B200."""

FILES = {
    "tests/kernels/gpu/test_codes.py": "",
    "tests/kernels/gpu/test_fake_quantize.py": "",
    "tests/kernels/gpu/test_row_streams.py": "",
    "tests/kernels/gpu/test_tiles.py": "",
    "tests/kernels/gpu/test_fake_quantize_dynamic.py": "",
    "tests/kernels/gpu/test_candidate_errors.py": "",
    "tests/kernels/gpu/test_extremes.py": "triton or launch",
    "tests/kernels/gpu/test_statistics.py": "",
    "tests/kernels/gpu/test_feedback_rounding.py": "",
    "tests/ops/test_fake_quantize_float.py": "triton",
    "tests/invariants/test_on_gpu.py": "",
    "tests/invariants/test_no_waits.py": "calibration and cnn",
}
"""Of each file, the tests that launch kernels. The first is the canary of ``make test``."""


CHIPS = pytest.mark.parametrize("chip", [QUICK, *(pytest.param(chip, marks=pytest.mark.slow) for chip in SLOW)])
OF_FAKE_QUANTIZATION = [file for file in FILES if "fake_quantize" in file]


def check(file, chip):
    environment = {**os.environ, "QTK_EMULATE_GPU": chip, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", file, "-k", FILES[file]]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", run.stdout)[1]) > 5


@pytest.mark.medium
class TestOthers:
    """In a class of their own: each is run by one of the processes that share the suite."""

    @CHIPS
    @pytest.mark.parametrize("file", [file for file in FILES if file not in OF_FAKE_QUANTIZATION])
    def test_the_machine_code_computes_the_reference(self, file, chip):
        check(file, chip)


@pytest.mark.medium
@pytest.mark.kernels
class TestFakeQuantization:
    @CHIPS
    @pytest.mark.parametrize("file", OF_FAKE_QUANTIZATION)
    def test_the_machine_code_computes_the_reference(self, file, chip):
        check(file, chip)
