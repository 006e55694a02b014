"""Apple's packages, loaded when used: coreai-torch writes ``.aimodel`` files, coreai-core reads and runs them."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.export import ExportedProgram

from qtk.capture.torch_export import silent_torch
from qtk.errors import ExportError, first_line
from qtk.export.coreai.lowerings import SiteLowerings

INSTALL = "pip install 'qtk[coreai]'"

ENTRY = "main"
"""Name of the only function of a file."""


@contextlib.contextmanager
def _needed(what: str) -> Iterator[None]:
    """Imports inside. Raises: ExportError saying how to install what is missing."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of versions of torch that Apple has not tried
            yield
    except ImportError as error:
        raise ExportError(f"{what} needs the packages coreai-torch and coreai-core, {error.name} is missing; "
                          f"{INSTALL}") from error


def converted(program: ExportedProgram, inputs: Sequence[str], outputs: Sequence[str]) -> Any:
    """A program with ``quantized_decomposed`` ops as Core AI's program, which quantizes where the program does.

    Args:
        program: the program; its constants are codes behind a dequantize op.
        inputs: the names of its inputs, in order.
        outputs: likewise of its outputs.

    Raises: ExportError saying how to install the packages, if they are missing, or what the converter refuses.
    """
    with _needed("the format 'coreai'"):
        from coreai_torch import TorchConverter, get_decomp_table
    with silent_torch(), contextlib.redirect_stdout(io.StringIO()):
        try:
            converter = TorchConverter(mode=TorchConverter.Mode.RELEASE)  # without paths of source files
            program = program.run_decompositions(get_decomp_table())
            for op, lowering in SiteLowerings(program).by_op.items():
                converter.register_torch_lowering(op)(lowering)
            converter.add_exported_program(program, input_names=[*inputs], output_names=[*outputs])
            return converter.to_coreai()
        except Exception as error:  # whatever the converter says
            raise ExportError(f"Core AI's converter refuses the simulation: {first_line(error)}; leave what it names "
                              "in float, by a rule with output: float, or export formats=('onnx',)") from error


def save(program: Any, path: Path, metadata: Mapping[str, str]) -> None:
    """Writes Core AI's program with texts as metadata. Raises: ExportError if the packages refuse it."""
    from coreai.runtime import AIModelAssetMetadata  # there: the program was converted

    stored = AIModelAssetMetadata()
    for key, value in metadata.items():
        stored.set_custom(key, value)
    try:
        program.save_asset(path, stored)
    except Exception as error:
        raise ExportError(f"cannot write {path}: {first_line(error)}; export formats=('onnx',)") from error


def load(path: Path) -> Any:
    """The file as coreai-core has it. Raises: ExportError if the package is missing, or it is no such file."""
    with _needed("reading an .aimodel file"):
        from coreai.authoring import AIModelAsset
    try:
        if not AIModelAsset.is_valid(path):  # which load does not look at
            raise ValueError("it has no program")
        return AIModelAsset.load(path)
    except Exception as error:
        raise ExportError(f"cannot read {path} as an .aimodel file: {first_line(error)}; name one that sim.export wrote"
                          ) from error
