"""Writes a simulation as files for runtimes: all of them, or none."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from torch import fx, nn

from qtk.capture.call_recording import record_calls
from qtk.capture.calls import Call, with_rows
from qtk.capture.inputs import ExampleInputs, split_inputs
from qtk.capture.packed import PackedRecurrent
from qtk.core.encoding import Encoding
from qtk.core.spec import QuantSpec
from qtk.errors import ExportError
from qtk.export import encodings_aimet, encodings_json
from qtk.export.atomic import staged_directory
from qtk.graph.graphs import roots
from qtk.nn.eval_mode import evaluating
from qtk.registry import Registry

ENCODINGS_FILE = "encodings.json"
AIMET_1_0_0_FILE, AIMET_2_0_0_FILE = "encodings_aimet_1.0.0.json", "encodings_aimet_2.0.0.json"


@dataclass(frozen=True, slots=True, eq=False)
class Exported:
    """What an exporter is given.

    Args:
        model: the prepared model with its quantizers simulating.
        encodings: site name → encoding.
        dynamic: site name → spec, where the range is taken at run time.
        example_inputs: a tensor, tuple or dict the model runs on.
    """

    model: nn.Module
    encodings: Mapping[str, Encoding]
    dynamic: Mapping[str, QuantSpec]
    example_inputs: ExampleInputs


Exporter: TypeAlias = Callable[[Exported, Path], None]
"""Writes its files into a directory."""

EXPORTERS: Registry[Exporter] = Registry("export format")


def onnx_name(path: str) -> str:
    """The file of a captured graph: ``model.onnx``, or that of an island by its place in the model.

    >>> onnx_name("backbone.body")
    'backbone.body.onnx'
    """
    return f"{path or 'model'}.onnx"


def export(
    model: nn.Module,
    encodings: Mapping[str, Encoding],
    example_inputs: ExampleInputs,
    directory: str | os.PathLike[str],
    *,
    check: Callable[[], None],
    dynamic: Mapping[str, QuantSpec] | None = None,
    formats: Sequence[str] = ("encodings", "onnx"),
    force: bool = False,
) -> None:
    """Writes every format into one new directory; if one fails, nothing of any is left.

    Args:
        model: the prepared model with its quantizers simulating.
        encodings: site name → encoding.
        example_inputs: a tensor, tuple or dict the model runs on.
        directory: where the files will be.
        check: runs first and raises if the simulation is not fit to be exported.
        dynamic: site name → spec, where the range is taken at run time.
        formats: names from ``EXPORTERS``.
        force: replace an existing directory.

    Raises: ConfigError for an unknown format, with the known ones; ExportError if the directory exists or cannot be
        written, or a format cannot express the model; whatever ``check`` raises.
    """
    if isinstance(formats, str):
        formats = (formats,)
    if not formats:
        raise ExportError(f"no formats to export; choose from {', '.join(EXPORTERS)}")
    exporters = [EXPORTERS[name] for name in dict.fromkeys(map(EXPORTERS.canonical, formats))]
    check()
    exported = Exported(model, encodings, dynamic or {}, example_inputs)
    with staged_directory(directory, force=force) as folder:
        for write in exporters:
            write(exported, folder)


def _encodings(exported: Exported, folder: Path) -> None:
    """Our own, and AIMET's schemas as far as they can hold the model."""
    _encodings_json(exported, folder)
    for write in (_encodings_aimet_1_0_0, _encodings_aimet_2_0_0):
        try:
            write(exported, folder)
        except ExportError as error:
            warnings.warn(f"one file less: {error}", stacklevel=2)


def _encodings_json(exported: Exported, folder: Path) -> None:
    encodings_json.export(exported.encodings, folder / ENCODINGS_FILE, dynamic=exported.dynamic)


def _encodings_aimet_1_0_0(exported: Exported, folder: Path) -> None:
    _refuse_dynamic(exported)
    encodings_aimet.export_1_0_0(exported.encodings, folder / AIMET_1_0_0_FILE)


def _encodings_aimet_2_0_0(exported: Exported, folder: Path) -> None:
    _refuse_dynamic(exported)
    encodings_aimet.export_2_0_0(exported.encodings, folder / AIMET_2_0_0_FILE)


def _refuse_dynamic(exported: Exported) -> None:
    if exported.dynamic:
        raise ExportError(f"AIMET's schemas know no ranges taken at run time, as {next(iter(exported.dynamic))} has; "
                          f"{ENCODINGS_FILE} lists them")


def _onnx(exported: Exported, folder: Path) -> None:
    try:
        from qtk.export.onnx import qdq  # loaded here: onnx is an extra, and slow to import
    except ImportError as error:
        raise ExportError(f"the format 'onnx' needs the package {error.name}; pip install 'qtk[onnx]'") from error
    calls = _graph_calls(exported)
    packed = [path for path, (graph, _) in calls.items() if isinstance(graph, PackedRecurrent)]
    if packed:
        raise ExportError(
            f"{', '.join(packed)}: a recurrent net on packed sequences has no form in ONNX, for their lengths are "
            "data; call it on padded sequences, or export with formats=('encodings',)"
        )
    for path, (graph, call) in calls.items():
        qdq.export(graph, call, folder / onnx_name(path))


def _graph_calls(exported: Exported) -> dict[str, tuple[fx.GraphModule, Call]]:
    """Every graph that Python calls, and how the example inputs reach it."""
    call, found = Call(*split_inputs(exported.example_inputs), None), roots(exported.model)
    if list(found) == [""]:
        return {"": (found[""], call)}
    with evaluating(exported.model):
        calls = record_calls(exported.model, [call], of=found.values())
    return {path: (graph, _example(graph, calls[graph])) for path, graph in found.items() if graph in calls}


def _example(graph: nn.Module, calls: Sequence[Call]) -> Call:
    """The largest of ``calls``; one without any rows gets some."""
    largest = max(calls, key=lambda call: call.numel)
    return largest if largest.numel else with_rows(graph, largest)


EXPORTERS.add("encodings", _encodings)
EXPORTERS.add("encodings_json", _encodings_json)
EXPORTERS.add("encodings_aimet_1.0.0", _encodings_aimet_1_0_0)
EXPORTERS.add("encodings_aimet_2.0.0", _encodings_aimet_2_0_0)
EXPORTERS.add("onnx", _onnx)
