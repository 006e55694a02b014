"""Runs ONNX files on a CPU without VNNI: Haswell, emulated by QEMU."""

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

QEMU = shutil.which("qemu-x86_64") if platform.machine() == "x86_64" else None

SCRIPT = """
import sys
import numpy as np
import onnxruntime

file, inputs, outputs = sys.argv[1:]
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
options.log_severity_level = 3
session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
np.savez(outputs, *session.run(None, dict(np.load(inputs))))
"""


def run_without_vnni(file: Path, **inputs: np.ndarray) -> list[np.ndarray]:
    """The outputs of ONNX Runtime with its default settings."""
    return _run([QEMU, "-cpu", "Haswell"], file, inputs)


def run_with_defaults(file: Path, **inputs: np.ndarray) -> list[np.ndarray]:
    """The same on this CPU."""
    return _run([], file, inputs)


def _run(emulator: list[str], file: Path, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    given, made = file.with_suffix(".inputs.npz"), file.with_suffix(".outputs.npz")
    np.savez(given, **inputs)
    command = [*emulator, sys.executable, "-c", SCRIPT, str(file), str(given), str(made)]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    outputs = np.load(made)
    return [outputs[name] for name in outputs.files]
