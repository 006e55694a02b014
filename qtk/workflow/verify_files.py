"""Verifies exported files by themselves, where the simulation is not at hand: against ONNX Runtime, optimizations off.

Without optimizations each operator computes what ONNX defines, so this shows what a runtime's optimizations and the CPU
change; that the file holds what was simulated was checked when it was exported.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from qtk.analysis.simulated_values import SimulatedValue
from qtk.core.dtypes import FloatDtype
from qtk.data.forward_pass import read
from qtk.errors import ExportError
from qtk.export.onnx.file_states import file_states
from qtk.export.onnx.stored_sites import stored_sites
from qtk.public import public
from qtk.report.findings import Circumstances, judge
from qtk.report.verdict import Verdict
from qtk.runtimes.file_runs import FileRuns
from qtk.runtimes.onnx_reference import onnx_inputs
from qtk.runtimes.reference_file import random_batches, step_of_encoding
from qtk.runtimes.saturation import saturating_weights
from qtk.runtimes.session import integer_sums_saturate
from qtk.torch_private import pytree
from qtk.workflow.verify_export import USUAL_LATENCY, LatencyRequest, float_file, runtime_kind, size_bytes

REFERENCE = "ONNX Runtime, optimizations off"


@public
def verify_files(
    directory: str | os.PathLike[str], data: Iterable[object] | None = None, *, runtime: str = "onnxruntime",
    latency: LatencyRequest = USUAL_LATENCY, valid: Sequence[str] = (), progress: bool = True,
) -> list[Verdict]:
    """The verdict on each ONNX file in a directory, or on one file.

    Args:
        directory: what ``sim.export`` wrote, or one file of it.
        data: batches, each a tensor, a tuple or a dict; ``None``: random values within the ranges of the inputs.
            Buffers of the model begin as they were exported; each batch begins with the buffers of the batch before.
        runtime: the runtime they are for, ``onnxruntime`` or ``openvino``, which decides what is red.
        latency: the latency to measure; without a float export only the files are timed.
        valid: names of inputs that say which tokens count, masks [samples, tokens] of 0 and 1. Of a value whose first
            axes are these two, or one of both, other tokens are not compared.
        progress: show bars where it takes longer than seconds.

    Raises: ExportError if ``valid`` names no input that is such a mask, there is no file, one was not written by qtk,
        or does not run on the data.
    """
    kind = runtime_kind(runtime)
    if kind.format != "onnx":
        raise ExportError(f"{kind.title} runs {kind.suffix} files, and this verifies ONNX files by themselves; run "
                          "qtk verify --all, or sim.verify_export(directory, data, runtime=…)")
    given = Path(directory)
    if not given.exists():
        raise ExportError(f"{directory} does not exist; give what sim.export or qtk quantize wrote, or a file of it")
    files = [given] if given.is_file() else sorted(given.glob("*.onnx"))
    if not files:
        inside = sorted({file.parent.relative_to(given).as_posix() for file in given.glob("**/*.onnx")})
        remedy = f"name one of {', '.join(inside)} in it" if inside else "export with formats=('onnx',)"
        raise ExportError(f"{directory} holds no .onnx file to verify; {remedy}")
    if data is not None and files[1:]:
        raise ExportError(f"{directory} holds {len(files)} files, and data fits one; name the file")
    return [_verify(file, data, runtime, latency, valid, progress=progress) for file in files]


def _verify(
    file: Path, data: Iterable[object] | None, runtime: str, latency: LatencyRequest, valid: Sequence[str], *,
    progress: bool,
) -> Verdict:
    in_float = None if latency.float_export is None else float_file(latency.float_export, file)
    stored = list(stored_sites(file))
    encodings = {site.name: site.encoding for site in stored if site.encoding is not None}
    try:
        runs = FileRuns(file, {}, threads=latency.threads)
    except ExportError:
        raise
    except Exception as error:
        raise ExportError(f"{file}: ONNX Runtime cannot load it: {error}") from error
    try:
        examples: tuple[dict[str, Tensor], list[SimulatedValue], dict[tuple[str, int], SimulatedValue]] | None = None
        states = file_states(file)
        held = {name: state.first for name, state in states.items() if state.first is not None}
        batches = random_batches(
            [each for each in onnx_inputs(runs) if each.name not in held], encodings) if data is None else read(data)
        for batch in tqdm(batches, desc=f"verifying {file.name}", unit="batch", delay=2, disable=not progress):
            free = [name for name, _, _ in runs.inputs if name not in held]
            inputs = {**inputs_by_name(free, batch), **held}
            outputs, sites = runs.reference(inputs)
            held = {name: outputs[runs.outputs.index(states[name].output)] for name in held}
            returned = {site.name: encodings.get(site.site) for site in runs.off.sites}
            masks = [_mask(name, inputs) for name in valid]
            compared = [
                SimulatedValue(value, step_of_encoding(value, returned.get(name)), _counted(value, masks))
                for name, value in zip(runs.outputs, outputs, strict=True)
            ]
            values = {key: SimulatedValue(value, step_of_encoding(value, encodings.get(key[0])), _counted(value, masks))
                      for key, value in sites.items()}
            runs.compare(inputs, compared, values)
            examples = examples or (inputs, compared, values)
        if examples is None:
            raise ExportError(f"{file}: no batches to verify it on")
        first = examples[0]
        runs.run_ops(*examples)
        if latency.turns:
            runs.measure(first, in_float, turns=latency.turns, progress=progress, batch_size=latency.batch_size)
        results = runs.runs()
    finally:
        runs.close()
    has_minifloats = any(isinstance(site.spec.dtype, FloatDtype) for site in stored)
    circumstances = Circumstances(
        runtime, integer_sums_saturate(), saturating_weights(file), has_minifloats, random_inputs=data is None,
        is_half=any(tensor.dtype is torch.float16 for tensor in first.values()), reference=REFERENCE,
    )
    found = judge(results, circumstances)
    float_bytes = None if in_float is None else size_bytes(in_float)
    return Verdict(file, REFERENCE, results, found, size_bytes(file), float_bytes, timing=runs.timing)


def _mask(name: str, inputs: Mapping[str, Tensor]) -> Tensor:
    """The input of a name as a mask. Raises: ExportError if it is none."""
    mask = inputs.get(name)
    if mask is None or mask.ndim != 2 or not bool(((mask == 0) | (mask == 1)).all()):
        raise ExportError(f"valid={name!r} must name an input [samples, tokens] of 0 and 1; the inputs are "
                          f"{', '.join(f'{each} {list(value.shape)}' for each, value in inputs.items())}")
    return mask.bool()


def _counted(value: Tensor, masks: Sequence[Tensor]) -> Tensor | None:
    """Returns which elements of a value belong to tokens that count; ``None``: all."""
    for mask in masks:
        for tokens in (mask, mask.flatten()):
            if value.ndim > tokens.ndim and value.shape[:tokens.ndim] == tokens.shape:
                return tokens.reshape(*tokens.shape, *[1] * (value.ndim - tokens.ndim)).expand(value.shape)
    return None


def inputs_by_name(names: Sequence[str], batch: object) -> dict[str, Tensor]:
    """The tensors of a batch under the names of a file's inputs; labels beside the only one are left out.

    Raises: ExportError if there are more or fewer.
    """
    if isinstance(batch, Mapping) and set(batch) == set(names):
        return {name: batch[name] for name in names}
    tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    if isinstance(batch, (tuple, list)) and len(names) == 1 < len(tensors) == len(batch):
        del tensors[1:]  # labels
    if len(tensors) != len(names):
        raise ExportError(f"the file takes {', '.join(names)}, a batch has {len(tensors)} tensors")
    return dict(zip(names, tensors, strict=True))
