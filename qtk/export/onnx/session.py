"""ONNX Runtime on an exported file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from qtk.core.dtypes import FloatDtype
from qtk.errors import ExportError
from qtk.quantizers.quantizer import Mode, Quantizer

if TYPE_CHECKING:
    import onnxruntime


def require_onnxruntime() -> None:
    """Raises: ExportError with what to install, if ONNX Runtime is not there."""
    try:
        import onnxruntime  # noqa: F401  an extra: loaded where it is needed
    except ImportError as error:
        raise ExportError("running an ONNX file needs onnxruntime; run: pip install \"qtk[onnx]\"") from error


def open_session(path: Path, model: nn.Module, *, optimized: bool = True) -> tuple[onnxruntime.InferenceSession, str]:
    """Loads a file on the CPU, with all of the runtime's optimizations or none.

    Models with small floats run without: the optimizations of ONNX Runtime (seen in 1.31) take float8 for integers.
    They fuse it into integer operators, and drop a ReLU before a QuantizeLinear whose zero point is 0.

    Args:
        path: the file.
        model: the simulation it was exported from.
        optimized: whether to take the optimizations.

    Returns: the session, and a description of how the file runs.

    Raises: ExportError if onnxruntime is not installed or cannot load the file.
    """
    require_onnxruntime()
    import onnxruntime

    floats = any(
        isinstance(module, Quantizer) and module.mode is Mode.SIMULATE and isinstance(module.spec.dtype, FloatDtype)
        for module in model.modules()
    )
    optimized = optimized and not floats
    levels = onnxruntime.GraphOptimizationLevel
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimized else levels.ORT_DISABLE_ALL
    options.log_severity_level = 3  # errors; its warnings speak of constants it cannot fold
    described = f"ONNX Runtime {onnxruntime.__version__}, optimizations {'on' if optimized else 'off'}"
    described += " (they take float8 for integers)" if floats else ""
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise ExportError(f"{path}: {described} cannot load it: {error}") from error
    return session, described
