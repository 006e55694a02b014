"""Opens ONNX Runtime sessions on the CPU."""

from __future__ import annotations

import enum
import functools
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from qtk.core.dtypes import FloatDtype
from qtk.errors import ExportError
from qtk.quantizers.quantizer import Mode, Quantizer

if TYPE_CHECKING:
    import onnxruntime



class Optimizations(enum.Enum):
    """How ONNX Runtime runs a file: operator by operator, as it does by default, or so in its exact mode."""

    OFF = "off"
    ON = "on"
    EXACT = "exact"


EXACT_MODE = "session.x64quantprecision"
"""ONNX Runtime's setting that stores constant int8 weights as uint8, whose products with uint8 never saturate."""


FLOAT_PRODUCTS = "session.qdq_matmulnbits_accuracy_level"
"""ONNX Runtime's setting for products with weights alone in integers: 1 computes them in float32. Its default, 4,
rounds their inputs to 8 bits in blocks as well, which the simulation does not."""


NO_BFLOAT16 = (
    "ONNX Runtime (seen in 1.32) has few bfloat16 operators on the CPU: simulate and export model.float() instead"
)
"""What is said of a model that is bfloat16 as a whole."""

SATURATES = "u8 × s8 sums saturate on this CPU"

SPINNING = "session.intra_op.allow_spinning"
"""ONNX Runtime's setting that lets threads wait in a loop for the next run. Off here, where several sessions are open
at a time: threads of one session take the cores from the next, whose time doubles on two cores (seen in 1.32)."""


def require_onnxruntime() -> None:
    """Raises: ExportError with the install command, if ONNX Runtime is not installed."""
    try:
        import onnxruntime  # noqa: F401  an extra: loaded where it is needed
    except ImportError as error:
        raise ExportError("running an ONNX file needs onnxruntime; run: pip install \"qtk[onnx]\"") from error


def open_session(path: Path, model: nn.Module, *, optimized: bool = True) -> tuple[onnxruntime.InferenceSession, str]:
    """Loads the exported file of a simulation, with all of the runtime's optimizations or none.

    Models with minifloats run without them: the optimizations of ONNX Runtime (seen in 1.31) treat float8 as integers.
    They fuse it into integer operators, and drop a ReLU before a QuantizeLinear whose zero point is 0.

    Args:
        path: the file.
        model: the simulation it was exported from.
        optimized: whether to enable the optimizations.

    Returns: the session, and a description of how the file runs.

    Raises: ExportError if onnxruntime is not installed or cannot load the file.
    """
    require_onnxruntime()
    has_minifloats = any(
        isinstance(module, Quantizer) and module.mode is Mode.SIMULATE and isinstance(module.spec.dtype, FloatDtype)
        for module in model.modules()
    )
    try:
        session, description = create_session(path, optimized=optimized and not has_minifloats)
    except Exception as error:
        remedy = bfloat16_remedy(model)
        raise ExportError(f"{path}: ONNX Runtime {_version()} cannot load it: {error}"
                          f"{'' if remedy is None else f'; {remedy}'}") from error
    return session, description + (" (they take float8 for integers)" if has_minifloats else "")


def bfloat16_remedy(model: nn.Module) -> str | None:
    """Says what to do if ONNX Runtime refuses a file for its bfloat16 parameters; ``None`` without such.

    >>> bfloat16_remedy(nn.Linear(4, 2).bfloat16())
    'ONNX Runtime (seen in 1.32) has few bfloat16 operators on the CPU: simulate and export model.float() instead'
    >>> bfloat16_remedy(nn.Linear(4, 2))
    """
    if not any(parameter.dtype is torch.bfloat16 for parameter in model.parameters()):
        return None
    return NO_BFLOAT16


def other_float_remedy(model: nn.Module) -> str | None:
    """Says what to do if ONNX Runtime refuses a file with bfloat16 or float64 parameters; ``None`` without."""
    if any(parameter.dtype is torch.float64 for parameter in model.parameters()):
        return "ONNX Runtime has few float64 operators on the CPU: simulate and export model.float() instead"
    return bfloat16_remedy(model)


def create_session(
    file: Path | bytes, *, optimized: bool = True, threads: int = 0, optimized_file: Path | None = None
) -> tuple[onnxruntime.InferenceSession, str]:
    """A session whose integer sums are exact on every CPU.

    Where ONNX Runtime's kernels saturate (x86 without VNNI), a copy of the file is opened whose int8 weights that can
    saturate are uint8 (``unsigned_weights``). A file that qtk did not write runs in ONNX Runtime's exact mode, or, if
    that refuses it (seen in 1.31: such a weight that several operators share), with the optimizations off. Sums over
    two activations, one uint8 and one int8, still saturate.

    Args:
        file: an ONNX file, or its content.
        optimized: whether to enable the runtime's optimizations.
        threads: intra-op threads; 0 leaves the number to ONNX Runtime.
        optimized_file: where the optimized graph is written; ``None``: nowhere.

    Returns: the session, and a description of how the file runs.

    Raises: whatever ONNX Runtime raises for a file that it cannot load.
    """
    switched = f"ONNX Runtime {_version()}, optimizations"
    if not integer_sums_saturate():
        session = _session(file, threads, optimized=optimized, optimized_file=optimized_file)
        return session, f"{switched} {'on' if optimized else 'off'}"
    with tempfile.TemporaryDirectory(prefix="qtk-", ignore_cleanup_errors=True) as folder:
        source = None if isinstance(file, bytes) else _with_unsigned_weights(file, Path(folder))
        if not optimized or source is not None:
            copied = "" if source in (None, file) else f", with uint8 weights ({SATURATES})"
            session = _session(source or file, threads, optimized=optimized, optimized_file=optimized_file)
            return session, f"{switched} {'on' if optimized else 'off'}{copied}"
    try:
        session = _session(file, threads, exact=True, optimized_file=optimized_file)
    except Exception:  # if the file itself is broken, the second attempt raises
        session = _session(file, threads, optimized=False)
        return session, f"{switched} off ({SATURATES}, and {EXACT_MODE}=1 refuses the file)"
    return session, f"{switched} on, {EXACT_MODE}=1 ({SATURATES} without it)"


def _with_unsigned_weights(file: Path, folder: Path) -> Path | None:
    """The file to open in place of ``file``; ``None`` if qtk did not write it."""
    from qtk.runtimes.unsigned_weights import with_unsigned_weights  # loaded here: slow to import

    try:
        return with_unsigned_weights(file, folder)
    except ExportError:
        return None


def session_with(
    file: Path | bytes, optimizations: Optimizations, *, threads: int = 0, optimized_file: Path | None = None
) -> tuple[onnxruntime.InferenceSession, str]:
    """A session that runs as asked; arguments and result as ``create_session``.

    With the optimizations on, or in ONNX Runtime's exact mode, it does so on every CPU, saturating or not; with the
    optimizations off, its sums are exact.

    Raises: ExportError if onnxruntime is not installed; whatever it raises for a file that it cannot load.
    """
    require_onnxruntime()
    if optimizations is Optimizations.OFF:
        return create_session(file, optimized=False, threads=threads, optimized_file=optimized_file)
    is_exact = optimizations is Optimizations.EXACT
    session = _session(file, threads, exact=is_exact, optimized_file=optimized_file)
    return session, f"ONNX Runtime {_version()}, optimizations on{f', {EXACT_MODE}=1' if is_exact else ''}"


def opens_in_exact_mode(file: Path) -> bool:
    """Says whether ONNX Runtime opens a file in its exact mode, ``EXACT_MODE``; true where it is not installed."""
    try:
        session_with(file, Optimizations.EXACT)
    except ExportError:
        return True
    except Exception:  # whatever the runtime says
        return False
    return True


def profiling_session(
    file: Path, profile: Path, *, threads: int = 0, optimized_file: Path | None = None
) -> onnxruntime.InferenceSession:
    """An optimized session that notes how long each kernel takes, in a file whose name begins with ``profile``.

    ``threads`` and ``optimized_file`` as for ``create_session``.

    Raises: ExportError if onnxruntime is not installed; whatever it raises for a file that it cannot load.
    """
    require_onnxruntime()
    return _session(file, threads, profile=profile, optimized_file=optimized_file)


@functools.cache
def integer_sums_saturate() -> bool:
    """Says whether ONNX Runtime's uint8 × int8 kernels saturate on this CPU; found by running one.

    x86 without VNNI adds products in pairs in int16: 2 · 255 · 127 = 64,770 becomes 32,767.
    """
    from onnx import TensorProto, helper, numpy_helper

    inputs, weight = np.full((1, 4), 255, np.uint8), np.full((4, 1), 127, np.int8)
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["x", "w"], ["y"])],
        "sum",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, inputs.shape)],
        [helper.make_tensor_value_info("y", TensorProto.INT32, (1, 1))],
        [numpy_helper.from_array(weight, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    (result,) = _session(model.SerializeToString(), threads=1).run(None, {"x": inputs})
    return int(result.item()) != 4 * 255 * 127


def _session(
    file: Path | bytes, threads: int, *, optimized: bool = True, exact: bool = False,
    optimized_file: Path | None = None, profile: Path | None = None,
) -> onnxruntime.InferenceSession:
    import onnxruntime

    levels = onnxruntime.GraphOptimizationLevel
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimized else levels.ORT_DISABLE_ALL
    options.intra_op_num_threads = threads
    if optimized_file is not None:
        options.optimized_model_filepath = str(optimized_file)
    if profile is not None:
        options.enable_profiling, options.profile_file_prefix = True, str(profile)
    options.log_severity_level = 4  # nothing on stderr: an error is raised, and some are expected
    options.add_session_config_entry(FLOAT_PRODUCTS, "1")
    options.add_session_config_entry(SPINNING, "0")
    if exact:
        options.add_session_config_entry(EXACT_MODE, "1")
    source = file if isinstance(file, bytes) else str(file)
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def _version() -> str:
    import onnxruntime

    return str(onnxruntime.__version__)
