"""The kernel backends: the C++ library, which is built if there is a compiler, and Triton."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import torch

from qtk.kernels.native_build import NAME
from qtk.public import public

DISABLE = "QTK_DISABLE_NATIVE"
"""Environment variable: set to 1, the reference runs instead of the C++ kernels."""

DISABLE_TRITON = "QTK_DISABLE_TRITON"
"""Environment variable: set to 1, the reference runs instead of the Triton kernels."""

LIBRARY = Path(__file__).parents[1] / f"{NAME}.so"


@public
def backends() -> dict[str, str]:
    """Says which backend each device type uses, and why not the faster one.

    >>> sorted(backends())
    ['cpu', 'cuda']
    """
    kernels = {"cpu": ("C++", load_native()), "cuda": ("Triton", triton_unavailable())}
    return {
        device: f"{name} kernels" if reason is None else f"reference; {name} kernels {reason}"
        for device, (name, reason) in kernels.items()
    }


@functools.cache
def load_native() -> str | None:
    """Loads the C++ kernels, once per process. Returns: ``None``, or the reason why they are not loaded."""
    if _is_set(DISABLE):
        return f"switched off by {DISABLE}"
    if not LIBRARY.exists():
        return "not built; run qtk build-kernels where a C++ compiler is"
    spec = importlib.util.spec_from_file_location(f"qtk.{NAME}", LIBRARY)
    assert spec is not None
    try:
        sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    except ImportError as error:
        first = str(error).strip().splitlines()[0]
        return f"built for another torch than {torch.__version__}, run qtk build-kernels: {first}"
    return None


def native() -> Any:
    """The library of the C++ kernels, a module; it is loaded."""
    return sys.modules[f"qtk.{NAME}"]


@functools.cache
def triton_unavailable() -> str | None:
    """The reason why the Triton kernels are not in use, ``None`` if they are. Does not import Triton."""
    if _is_set(DISABLE_TRITON):
        return f"switched off by {DISABLE_TRITON}"
    if not torch.cuda.is_available():
        return "wait for a GPU"
    if importlib.util.find_spec("triton") is None:
        return "not there; run pip install triton"
    return None


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "0") not in ("", "0")
