"""The runtimes by name: what file of an export each runs, and how it is loaded, made from a float model, and judged."""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from torch import Tensor, fx

from qtk.calls.calls import Call
from qtk.errors import ExportError
from qtk.export import pt2e
from qtk.export.file_signature import file_stem
from qtk.registry import Registry
from qtk.report.findings import Circumstances, judge, judge_alone
from qtk.report.verdict import FileRun, Finding
from qtk.runtimes.runtime_runs import Opener, RuntimeRuns, inputs_of_file
from qtk.runtimes.way import Runs


class FileWriter(Protocol):
    """Writes a graph as a file of the kind that a runtime reads."""

    def __call__(self, model: fx.GraphModule, call: Call, path: Path) -> object: ...


Timed = Callable[[Mapping[str, Tensor]], Callable[[], object]]
"""Inputs by name → what runs a loaded file once on them, for ``median_latencies_ms``."""


class FileLoader(Protocol):
    """Loads a file as the runtime comes, to be timed; ``threads`` 0 leaves their number to the runtime."""

    def __call__(self, file: Path, threads: int = 0) -> Timed: ...


def _nothing(file: Path) -> Sequence[str]:
    return ()


@dataclass(frozen=True)
class RuntimeKind:
    """A runtime.

    Args:
        name: its name, in registries and certificates.
        title: its name in tables.
        packages: what of Python it needs: a name that can be imported → the name that pip installs.
        extra: the extra of qtk that has them.
        suffix: what its files end in: ``.onnx``.
        format: the export format that writes them.
        open: loads a file: path, reasons, threads → its runs.
        write_float: writes a graph, its quantizers bypassed, as such a file.
        load: loads a file to be timed: path, threads → inputs by name → what runs it once.
        targets: the shipped targets whose files are for it; what it does to others is no red verdict.
        judge: what is wrong with its runs, or worth knowing.
        saturating: the sites of weights whose products its integer sums may not hold on some CPUs.
        untimed: why times that are measured here say nothing of its devices; ``None`` if they do.
    """

    name: str
    title: str
    packages: Mapping[str, str]
    extra: str
    suffix: str
    format: str
    open: Callable[[Path, Mapping[str, str], int | None], Runs]
    write_float: FileWriter
    load: FileLoader
    targets: tuple[str, ...] = ()
    judge: Callable[[Sequence[FileRun], Circumstances], tuple[Finding, ...]] = judge_alone
    saturating: Callable[[Path], Sequence[str]] = _nothing
    untimed: str | None = None

    @property
    def missing(self) -> str | None:
        """The package of it that is not installed; ``None`` if all are."""
        return next((pip for name, pip in self.packages.items() if importlib.util.find_spec(name) is None), None)

    def file_name(self, path: str) -> str:
        """File name of a captured graph: ``model``, or an island's module path, with the suffix.

        >>> RUNTIMES["litert"].file_name(""), RUNTIMES["litert"].file_name("backbone.body")
        ('model.tflite', 'backbone.body.tflite')
        """
        return f"{file_stem(path or 'model')}{self.suffix}"

    def require(self) -> None:
        """Raises: ExportError naming the extra, if a package is missing."""
        if self.missing is not None:
            raise ExportError(f"running files in {self.title} needs the package {self.missing}; run: "
                              f'pip install "qtk[{self.extra}]"')


def _onnx_runs(file: Path, reasons: Mapping[str, str], threads: int | None) -> Runs:
    from qtk.runtimes.file_runs import FileRuns  # loaded here: slow to import

    return FileRuns(file, reasons, threads=threads)


def _onnx_file(model: fx.GraphModule, call: Call, path: Path) -> None:
    from qtk.export.onnx import qdq  # loaded here: slow to import

    qdq.export(model, call, path)


def _saturating(file: Path) -> Sequence[str]:
    from qtk.runtimes.saturation import saturating_weights  # loaded here: slow to import

    return tuple(saturating_weights(file))


def _runs(
    file: Path, reasons: Mapping[str, str], threads: int | None, *, ways: Callable[[], Mapping[str, Opener]]
) -> Runs:
    return RuntimeRuns(file, reasons, ways(), threads=threads)


def _onnx_timed(file: Path, threads: int = 0) -> Timed:
    from qtk.runtimes.session import create_session  # loaded here: slow to import

    session, _ = create_session(file, threads=threads)
    names = [value.name for value in session.get_inputs()]

    def timed(inputs: Mapping[str, Tensor]) -> Callable[[], object]:
        feed = {name: value.detach().cpu().numpy() for name, value in inputs_of_file(names, inputs).items()}
        return lambda: session.run(None, feed)

    return timed


def _openvino_timed(file: Path, threads: int = 0) -> Timed:
    from qtk.runtimes.openvino_model import OpenVinoModel

    model = OpenVinoModel(file, threads=threads)
    names = [port.get_any_name() for port in model.compiled.inputs]
    return lambda inputs: partial(model.run, inputs_of_file(names, inputs))


def _timed(file: Path, threads: int = 0, *, ways: Callable[[], Mapping[str, Opener]]) -> Timed:
    """Loads a file in the first of the ways, as the runtime comes."""
    loaded = next(iter(ways().values()))(file, {}, threads)
    return lambda inputs: loaded.timed(inputs_of_file(loaded.inputs, inputs))


def _litert_ways() -> dict[str, Opener]:
    from qtk.runtimes.litert_file import REFERENCE, LiteRtFile

    return {
        "LiteRT": lambda file, reasons, threads: LiteRtFile(file, reasons, threads=threads),
        f"LiteRT, {REFERENCE}": lambda file, reasons, threads: LiteRtFile(
            file, reasons, threads=threads, reference=True),
    }


def _litert_file(model: fx.GraphModule, call: Call, path: Path) -> None:
    from qtk.export.litert import file

    file.export(model, call, path)


def _coreai_ways() -> dict[str, Opener]:
    from qtk.runtimes.coreai_file import CoreAiFile

    return {"Core AI": lambda file, reasons, threads: CoreAiFile(file, reasons, threads=threads)}


def _coreai_file(model: fx.GraphModule, call: Call, path: Path) -> None:
    from qtk.export.coreai import file

    file.export(model, call, path)


def _executorch_ways() -> dict[str, Opener]:
    from qtk.runtimes.executorch_program import ExecuTorchProgram

    return {"ExecuTorch": lambda file, reasons, threads: ExecuTorchProgram(file, reasons, threads=threads)}


def _inductor_ways() -> dict[str, Opener]:
    from qtk.runtimes.inductor_program import InductorProgram

    return {"Inductor": lambda file, reasons, threads: InductorProgram(file, reasons, threads=threads)}


NUMBERS_ALONE = "Core AI is for Apple's devices; elsewhere it runs for the numbers alone"

RUNTIMES: Registry[RuntimeKind] = Registry("runtime")
for _kind in (
    RuntimeKind("onnxruntime", "ONNX Runtime", {"onnxruntime": "onnxruntime", "onnx": "onnx"}, "onnx", ".onnx", "onnx",
                _onnx_runs, _onnx_file, _onnx_timed, ("onnxruntime", "onnxruntime_vnni", "dynamic", "default"), judge,
                _saturating),
    RuntimeKind("openvino", "OpenVINO", {"openvino": "openvino", "onnxruntime": "onnxruntime"}, "openvino", ".onnx",
                "onnx", _onnx_runs, _onnx_file, _openvino_timed, ("openvino",), judge, _saturating),
    RuntimeKind("executorch", "ExecuTorch", {"executorch": "executorch", "torchao": "torchao"}, "executorch", ".pt2",
                "pt2e", partial(_runs, ways=_executorch_ways), pt2e.export, partial(_timed, ways=_executorch_ways),
                ("xnnpack",)),
    RuntimeKind("inductor", "Inductor", {"torchao": "torchao"}, "torchao", ".pt2", "pt2e",
                partial(_runs, ways=_inductor_ways), pt2e.export, partial(_timed, ways=_inductor_ways),
                ("x86_inductor",)),
    RuntimeKind("litert", "LiteRT", {"ai_edge_litert": "ai-edge-litert"}, "litert", ".tflite", "litert",
                partial(_runs, ways=_litert_ways), _litert_file, partial(_timed, ways=_litert_ways), ("litert",)),
    RuntimeKind("coreai", "Core AI", {"coreai": "coreai-core", "coreai_torch": "coreai-torch"}, "coreai", ".aimodel",
                "coreai", partial(_runs, ways=_coreai_ways), _coreai_file, partial(_timed, ways=_coreai_ways),
                ("coreai",), untimed=None if platform.system() == "Darwin" else NUMBERS_ALONE),
):
    RUNTIMES.add(_kind.name, _kind)


def runtime_of(target: str | None) -> RuntimeKind:
    """The runtime that files of a target are for; ONNX Runtime for a target of none of these.

    >>> runtime_of("xnnpack").title, runtime_of("tensorrt").title, runtime_of(None).title
    ('ExecuTorch', 'ONNX Runtime', 'ONNX Runtime')
    """
    kinds: Iterable[RuntimeKind] = RUNTIMES.values()
    return next((kind for kind in kinds if target in kind.targets), RUNTIMES["onnxruntime"])
