"""Writes a simulation as files for runtimes, and compares each file with it: all of them, or none."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch
from torch import fx

from qtk.aimet import encodings_aimet
from qtk.atomic import staged_directory
from qtk.calls.calls import Call
from qtk.calls.inputs import ExampleInputs
from qtk.calls.signature import values_of
from qtk.capture.tracing import TRACING
from qtk.config.load import runtime_of_target
from qtk.core.dtypes import dtype
from qtk.errors import ExportError
from qtk.graph.graphs import meta_of, roots, states_of
from qtk.graph.simulation import Simulation
from qtk.nn.mapped_weights import bounded
from qtk.registry import Registry
from qtk.report.findings import NO_FLOAT16, saturation_remedy
from qtk.report.stages import Stages
from qtk.transforms.keep_batch_norms import folded
from qtk.transforms.steps import STEPS, op_changes
from qtk.workflow import export_encodings, export_programs
from qtk.workflow.check import check
from qtk.workflow.exported_graphs import graph_calls, onnx_name, read_back

INT8 = dtype("int8")
"""Of fewer bits, pairs of codes are small enough for sums in int16; of no sign, ONNX Runtime adds in int32."""

GENAI_FOLDER = "genai"
"""Directory of what onnxruntime-genai runs."""

Writer: TypeAlias = Callable[[Simulation, ExampleInputs, Path, Stages], None]
"""Writes its files into a directory, reads them back and raises ExportError if they differ from the simulation."""


@dataclass(frozen=True, slots=True)
class Exporter:
    """An export format.

    Args:
        write: writes the files, and tells each stage when it begins.
        stages: how many stages it tells.
        each_graph: whether it tells so many of each graph, which has a file of its own.
    """

    write: Writer
    stages: int = 1
    each_graph: bool = False


EXPORTERS: Registry[Exporter] = Registry("export format")


@dataclass(frozen=True, slots=True)
class OnnxOptions:
    """Says what is asked of an ONNX file.

    Args:
        opset: ONNX operator set; ``None``: the lowest from 19 on that has the formats of all sites.
        run: run the file on the example inputs, with ONNX Runtime's optimizations off and on, where it is installed,
            and warn of what departs from the simulation.
        output_names: names of the outputs, in order; ``None``: the keys of the model's dict, or ``output_0``,
            ``output_1``, …. Names of axes are given with ``dynamic_shapes``.
        state_codes: take and return ``states`` as their integer codes, which a loop passes on as they are: of 8 bits a
            quarter of the bytes. Which output an input is next, and the encodings, stand in the file.
    """

    opset: int | None = None
    run: bool = True
    output_names: Sequence[str] | None = None
    state_codes: bool = False


def export(
    simulation: Simulation, example_inputs: ExampleInputs, directory: str | os.PathLike[str], *,
    formats: Iterable[str] | str = ("encodings", "onnx"), force: bool = False, onnx: OnnxOptions = OnnxOptions(),
    tokenizer: object | None = None, io_codes: bool = False, progress: bool = True,
) -> None:
    """Writes every format into one new directory, or nothing if one fails.

    >>> import pathlib, qtk, tempfile
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU()).eval()
    >>> sim = qtk.QuantSim(model, torch.randn(16, 8))
    >>> sim.compute_encodings([torch.randn(16, 8)], progress=False)
    >>> folder = pathlib.Path(tempfile.mkdtemp()) / "both"
    >>> sim.export(folder, progress=False)
    >>> (folder / "model.onnx").exists()
    True

    Each file is read back before the directory appears: its encodings and stored integers must equal the simulation's
    bit for bit. Batch norms that are kept until the export are folded while the files are written.

    Args:
        simulation: the simulation to export.
        example_inputs: a tensor, tuple or dict the model runs on.
        directory: the new directory: ``model.onnx``, ``model.pt2``, ``encodings.json`` and so on.
        formats: names, or one name, from ``EXPORTERS``.
        force: replace an existing directory.
        onnx: what is asked of the ONNX file; keywords of ``QuantSim.export``, where ``run`` is ``check``, which
            is asked of LiteRT and Core AI files too.
        tokenizer: its files are written into the folder of a language model.
        io_codes: LiteRT files take and return quantized inputs and outputs as their integer codes.
        progress: show a bar of the stages of all files.

    Raises: ConfigError for an unknown format, with the known ones; CheckError if the simulation is not sound;
        ExportError if the directory exists or cannot be written, a format cannot express the model, the names are not
        one for each output, a state has no codes, or a file read back differs from the simulation; nothing is written
        then.
    """
    names = [formats] if isinstance(formats, str) else list(formats)
    if not names:
        raise ExportError(f"no formats to export; choose from {', '.join(EXPORTERS)}")
    exporters = {name: EXPORTERS[name] for name in map(EXPORTERS.canonical, names)}
    if "onnx" in exporters:
        exporters["onnx"] = replace(exporters["onnx"], write=partial(_onnx, options=onnx))
    if "compressed_tensors" in exporters:
        exporters["compressed_tensors"] = Exporter(
            partial(_compressed_tensors, tokenizer=tokenizer, progress=progress), 2)
    if "litert" in exporters:
        exporters["litert"] = replace(
            exporters["litert"], write=partial(export_programs.litert, io_codes=io_codes, run=onnx.run))
    if "coreai" in exporters:
        exporters["coreai"] = replace(exporters["coreai"], write=partial(export_programs.coreai, run=onnx.run))
    for name, value, format in (("opset", onnx.opset, "onnx"), ("output_names", onnx.output_names, "onnx"),
                                ("state_codes", onnx.state_codes or None, "onnx"),
                                ("io_codes", io_codes or None, "litert"),
                                ("tokenizer", tokenizer, "compressed_tensors")):
        if value is not None and format not in exporters:
            shown = f"a {type(value).__name__}" if value is tokenizer else value
            raise ExportError(f"{name}={shown} has no effect on the formats {', '.join(exporters)}; add {format!r} or "
                              f"leave {name} out")
    check(simulation)
    folding = folded(simulation) if STEPS in meta_of(simulation.model) else contextlib.nullcontext(simulation)
    files = len(roots(simulation.model))
    total = sum(each.stages * (files if each.each_graph else 1) for each in exporters.values())
    with TRACING, bounded(simulation.model), staged_directory(directory, force=force) as folder, folding as deployed, \
            Stages(total, progress=progress) as stages:
        for each in exporters.values():
            each.write(deployed, example_inputs, folder, stages)


def _onnx(
    simulation: Simulation, example_inputs: ExampleInputs, folder: Path, stages: Stages, *,
    options: OnnxOptions = OnnxOptions(),
) -> None:
    run, output_names, state_codes = options.run, options.output_names, options.state_codes
    if state_codes and not states_of(simulation.model):
        raise ExportError("state_codes: the model has no states; name them, QuantSim(…, states={'past': 1}), or leave "
                          "it out")
    try:
        # loaded here: onnx is an extra, and slow to import
        from qtk.export.onnx import qdq
        from qtk.export.onnx.onnxruntime import float_inputs
        from qtk.runtimes import saturation, session
    except ImportError as error:
        raise ExportError(f"the format 'onnx' needs the package {error.name}; pip install 'qtk[onnx]'") from error
    calls = graph_calls(simulation.model, example_inputs)
    if output_names is not None and [*calls] != [""]:
        raise ExportError(f"output_names are for one file, and this model is exported as {len(calls)} files, one for "
                          "each graph in its Python; leave them out")
    for path, (graph, _) in calls.items():
        bfloat16 = values_of(graph, torch.bfloat16)
        if bfloat16:
            reason = f"{onnx_name(path)}: {', '.join(bfloat16)} would be bfloat16; {session.NO_BFLOAT16}"
            if run:
                raise ExportError(f"{reason}; check=False writes the file for another runtime")
            warnings.warn(reason, stacklevel=2)
        if any(parameter.dtype is torch.float16 for parameter in graph.parameters()):
            warnings.warn(f"{onnx_name(path)}: {NO_FLOAT16}: simulate and export model.float() instead", stacklevel=2)
    runtime = runtime_of_target(simulation.target)
    int16_sums = runtime is None or runtime.int16_sums  # also if it is for no runtime in particular
    contrib_operators = runtime is not None and runtime.contrib_operators
    functions = runtime is None or runtime.functions
    for path, (graph, call) in calls.items():
        file = folder / onnx_name(path)
        rounded = qdq.export(graph, call, file, opset=options.opset, target=simulation.target,
                             output_names=output_names, int16_sums=int16_sums, state_codes=state_codes,
                             contrib_operators=contrib_operators, functions=functions, begin=stages.of(file.name))
        if rounded:
            warnings.warn(f"{file.name}: ONNX Runtime has no float64 kernel of {', '.join(rounded)} on the CPU, which "
                          "the file computes in float32, between casts that take time: simulate and export "
                          "model.float() instead", stacklevel=2)
        stages.of(file.name)("reading back")
        with read_back(file):
            qdq.compare_with_simulation(file, graph)
    may_saturate = int16_sums and any(quantizer.spec.dtype == INT8 for quantizer in simulation.quantizers.values())
    paths = calls if may_saturate else ()
    names = [name for path in paths for name in saturation.saturating_weights(folder / onnx_name(path))]
    if names:
        others = f" and {len(names) - 1} other weights" if names[1:] else ""
        warnings.warn(
            f"products of 8-bit inputs and the int8 codes of {names[0]}{others} can overflow the int16 that "
            "ONNX Runtime adds them in on x86 without VNNI, and the file is then inaccurate there; "
            f"{saturation_remedy(opens=all(session.opens_in_exact_mode(folder / onnx_name(path)) for path in calls))}",
            stacklevel=2,
        )
    names = [name for graph, _ in calls.values()
             for name in float_inputs.weights_of_floats(graph, contrib_operators=contrib_operators)]
    if names:
        others = f" and {len(names) - 1} other weights" if names[1:] else ""
        warnings.warn(
            f"products of floats with {names[0]}{others}: ONNX Runtime by default rounds these to 8 bits in blocks; "
            f"for the numbers of the simulation open sessions with {session.FLOAT_PRODUCTS}=1", stacklevel=2,
        )
    if run:
        _run(calls, folder, stages)


def _onnx_genai(simulation: Simulation, example_inputs: ExampleInputs, folder: Path, stages: Stages) -> None:
    """Writes the ONNX file of a decoder with a cache, and the config by which onnxruntime-genai runs it."""
    config, graph = getattr(simulation.model, "config", None), roots(simulation.model).get("")
    if config is None or graph is None:
        raise ExportError("the format 'onnx_genai' is of a decoder of transformers that is one graph: its config has "
                          "what the runtime needs to know")
    inner = folder / GENAI_FOLDER
    inner.mkdir()
    _onnx(simulation, example_inputs, inner, stages)
    from qtk.export.onnx import genai  # onnx is there: the file was written
    from qtk.runtimes import session

    genai.export(graph, config, inner / onnx_name(""), {session.FLOAT_PRODUCTS: "1"})


def _run(calls: Mapping[str, tuple[fx.GraphModule, Call]], folder: Path, stages: Stages) -> None:
    """Warns of what ONNX Runtime computes otherwise than the simulation, if it is installed."""
    if importlib.util.find_spec("onnxruntime") is None:
        return
    from qtk.workflow.export_run import departures  # loaded here: slow to import

    for path, (graph, call) in calls.items():
        stages.of(onnx_name(path))("running")
        for line in departures(folder / onnx_name(path), graph, call):
            warnings.warn(f"{onnx_name(path)} was written, but {line}", stacklevel=2)


def _compressed_tensors(
    simulation: Simulation, example_inputs: ExampleInputs, folder: Path, stages: Stages, *,
    tokenizer: object | None = None, progress: bool = False,
) -> None:
    from qtk.export.compressed_tensors import folder as checkpoint  # loaded here: few exports need it
    from qtk.export.compressed_tensors.shards import STATE_FILE

    changes = op_changes(simulation.model)
    if changes:
        raise ExportError(f"a transform has changed the ops of the model ({', '.join(changes)}), and who loads a "
                          "compressed-tensors file runs the original's; make the simulation without it")
    stages.begin("the folder: writing")
    checkpoint.export(simulation.model, folder, tokenizer, progress=progress)
    stages.begin("the folder: reading back")
    with read_back(folder / STATE_FILE):
        checkpoint.compare_with_simulation(folder, simulation.model, progress=progress)


EXPORTERS.add("encodings", Exporter(export_encodings.encodings))
EXPORTERS.add("encodings_json", Exporter(export_encodings.encodings_json))
for schema in encodings_aimet.WRITERS:
    EXPORTERS.add(f"encodings_aimet_{schema}", Exporter(partial(export_encodings.encodings_aimet, schema)))
    EXPORTERS.add(f"aimet_{schema}", Exporter(partial(export_encodings.aimet, schema), 2))
EXPORTERS.add("onnx", Exporter(_onnx, 5, each_graph=True))
EXPORTERS.add("onnx_genai", Exporter(_onnx_genai, 5))
EXPORTERS.add("compressed_tensors", Exporter(_compressed_tensors, 2))
EXPORTERS.add("pt2e", Exporter(export_programs.pt2e, 2, each_graph=True))
EXPORTERS.add("litert", Exporter(export_programs.litert, 3, each_graph=True))
EXPORTERS.add("coreai", Exporter(export_programs.coreai, 3, each_graph=True))
