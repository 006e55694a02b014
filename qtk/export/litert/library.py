"""The packages litert-torch, which writes ``.tflite`` files, and ai-edge-litert, which reads them: loaded when used."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

from torch.export import ExportedProgram

from qtk.capture.torch_export import silent_torch
from qtk.errors import ExportError, first_line

INSTALL = "pip install 'qtk[litert]'"

SIGNATURE = "serving_default"
"""The one signature of a file, by which runtimes find inputs and outputs by name."""

MODULE_STACK = "nn_module_stack"
"""Metadata of nodes from which the converter makes the names of tensors."""


def schema() -> Any:
    """The classes of the file's tables. Raises: ExportError saying how to install them, if they are missing."""
    try:
        from ai_edge_litert import schema_py_generated
    except ImportError as error:
        raise ExportError(f"reading a .tflite file needs the package ai-edge-litert, {error.name} is missing; "
                          f"{INSTALL}") from error
    return schema_py_generated


def converted(program: ExportedProgram, inputs: Sequence[str], outputs: Sequence[str]) -> bytes:
    """A program with ``quantized_decomposed`` ops as a ``.tflite`` file that quantizes exactly where the program does.

    Args:
        program: the program; its constants are floats behind a quantize and a dequantize op.
        inputs: the names of its inputs, in order.
        outputs: likewise of its outputs.

    Raises: ExportError saying how to install the package, if it is missing, or what the converter refuses.
    """
    try:
        import litert_torch  # noqa: F401  (it registers the converter's dialects)
        from litert_converter.mlir import passmanager
        from litert_converter.mlir._mlir_libs import converter_api_ext
        from litert_torch import backend, fx_infra
        from litert_torch._convert.core import _run_convert_passes as run_convert_passes
        from litert_torch._convert.litert_converter import LazyModelExporter
        from litert_torch.backend.inline_consts import InlineConstsContext
    except ImportError as error:
        raise ExportError("the format 'litert' needs the package litert-torch, "
                          f"{error.name} is missing; {INSTALL}") from error
    with silent_torch(), _without_bars():
        try:
            program = fx_infra.safe_run_decompositions(
                program, fx_infra.decomp.pre_convert_decomp(), can_skip=False)
            context = backend.export_utils.create_ir_context()
            lowered = backend.export.exported_program_to_mlir(
                run_convert_passes(program), ir_context=context,
                lowering_context_plugins=[InlineConstsContext(enable_resource_constants=False)],
            )
            converter_api_ext.set_signature(lowered.module.operation, signature_name=SIGNATURE, input_names=[*inputs],
                                            output_names=[*outputs])
            module, config = converter_api_ext.merge_modules([lowered.module]), converter_api_ext.ConvertToTFLConfig()
            config.model_origin_framework, config.qdq_conversion_mode = "PYTORCH", "STATIC"
            config.strict_qdq_mode = True  # else floats between two quantized values become integers by themselves
            config.enable_x64 = False  # few kernels have 64-bit integers
            config.unsafe_fuse_dynamic_shaped_broadcast = True
            config.canonicalizing_inf_as_min_max_float = False
            with context:
                converter_api_ext.run_convert_to_tfl_passes(module, passmanager.PassManager(), config)
            content: bytes = LazyModelExporter(module=module).to_bytes()
        except Exception as error:  # whatever the converter says
            raise ExportError(f"LiteRT's converter refuses the simulation: {first_line(error)}; leave what it names in "
                              "float, by a rule with output: float, or export formats=('onnx',)") from error
    return content


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """Switches the converter's own progress lines off."""
    name = "LITERT_TORCH_SHOW_PROGRESS"
    before = os.environ.get(name)
    os.environ[name] = "n"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
