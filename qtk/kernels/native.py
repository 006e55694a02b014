"""The C++ library with the CPU kernels, built by ``setup.py`` where torch and a compiler are there."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import torch

DISABLE = "QTK_DISABLE_NATIVE"
"""Environment variable: set to 1, the reference runs instead."""

LIBRARY = Path(__file__).parents[1] / "_native.so"


def backends() -> dict[str, str]:
    """What computes on each kind of device, and why not something faster.

    >>> sorted(backends())
    ['cpu', 'cuda']
    """
    missing = why_not_native()
    return {
        "cpu": f"reference; C++ kernels {missing}" if missing else "C++ kernels",
        "cuda": "reference; there are no kernels for GPUs yet",
    }


@functools.cache
def why_not_native() -> str:
    """Loads the library. Returns: why it is not in use; empty if it is."""
    if os.environ.get(DISABLE, "0") not in ("", "0"):
        return f"switched off by {DISABLE}"
    if not LIBRARY.exists():
        return "not built; run pip install --no-build-isolation --editable . where a C++ compiler is"
    try:
        torch.ops.load_library(LIBRARY)  # type: ignore[no-untyped-call]
    except OSError as error:
        first = str(error).strip().splitlines()[0]
        return f"built for another torch than {torch.__version__}, build it again: {first}"
    return ""
