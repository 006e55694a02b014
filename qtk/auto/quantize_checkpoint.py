"""Quantizes a folder of safetensors into one that servers load, with few layers in memory at a time."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from qtk.atomic import staged_directory
from qtk.capture.tracing import TRACING, without_collections
from qtk.config.schema import QuantConfig
from qtk.data.forward_pass import Batch, Forward
from qtk.data.valid_tokens import Valid
from qtk.errors import ConfigError
from qtk.export.compressed_tensors import folder as checkpoint
from qtk.layerwise.methods import LayerwiseMethod
from qtk.layerwise.options import DEFAULT, LayerwiseOptions
from qtk.layerwise.report import LayerwiseReport
from qtk.nn.mapped_weights import bounded
from qtk.public import public
from qtk.quantsim import QuantSim
from qtk.workflow.check import check
from qtk.workflow.forecast import say_forecast
from qtk.workflow.layerwise import apply_layerwise
from qtk.workflow.model_folder import files_beside
from qtk.workflow.prepare import ExampleInputs
from qtk.workflow.round_scales import round_scales


@public
def quantize_checkpoint(
    folder: str | os.PathLike[str], directory: str | os.PathLike[str], *,
    config: str | Path | Mapping[str, object] | QuantConfig = "vllm_w4a16",
    methods: str | Iterable[str | LayerwiseMethod] = (), data: Iterable[Batch] | None = None,
    example_inputs: ExampleInputs | None = None, model: Callable[[], nn.Module] | None = None,
    forward: Forward | None = None, num_batches: int | None = None, valid: Valid | None = None,
    options: LayerwiseOptions = DEFAULT, verify: bool = True, force: bool = False, progress: bool = True,
) -> LayerwiseReport | None:
    """Quantizes the weights of a folder and writes a compressed-tensors folder, however large the model is.

    >>> qtk.quantize_checkpoint("llama", "llama-int4")  # doctest: +SKIP
    >>> qtk.quantize_checkpoint("llama", "llama-gptq", methods="gptq", data=batches)  # doctest: +SKIP

    The weights of the source stay in its files, which are mapped; of what is computed one layer is in memory at a
    time. The same steps on a model in memory write the same bytes: ``QuantSim``, ``compute_encodings(None)``,
    ``round_scales``, ``apply_layerwise``, ``export(formats="compressed_tensors")``.

    A killed run leaves no output; the same call goes on behind the last layer that its methods finished, and writes the
    same bytes. These layers wait in ``DIRECTORY.layers``, or in ``options.checkpoint_dir``.

    Args:
        folder: what ``save_pretrained`` of transformers wrote, or safetensors for ``model``.
        directory: the new folder, with the files of the tokenizer that lie in the old one.
        config: a target of weights alone, such as ``vllm_w4a16``, or a file or mapping that extends one.
        methods: layer-wise methods, ``"gptq"``; without any weights are rounded, and ``data`` is not used.
        data: calibration batches for the methods.
        example_inputs: what the model runs on; ``None``: the first batch, or a few token ids.
        model: makes the model, if it is not one of transformers; its parameters get no memory meanwhile.
        forward: how to run the model on a batch.
        num_batches: batches to take of the data; ``None``: all.
        valid: which tokens count, as for ``compute_encodings``.
        options: of the layer-wise run.
        verify: read the folder back and compare it with the simulation.
        force: replace a directory that qtk wrote.
        progress: show bars.

    Returns: the report of the layer-wise run; ``None`` without methods.

    Raises: ConfigError if the folder cannot be loaded, or data are missing; ExportError if the directory exists, or the
        format cannot hold what is quantized; else as the steps.

    """
    source, target = Path(folder), Path(directory)
    resolved = [methods] if isinstance(methods, str) else list(methods)
    if resolved and data is None:
        raise ConfigError(f"methods {', '.join(map(str, resolved))} need data; pass batches, or leave methods out")
    if example_inputs is None:
        batch = next(iter(data), None) if forward is None and not isinstance(data, Iterator | None) else None
        example_inputs = batch if isinstance(batch, torch.Tensor | tuple | dict) else TOKENS
    with staged_directory(target, force=force) as stage:
        with nullcontext() if resolved else without_collections():  # of one run: little
            sim = QuantSim.from_checkpoint(
                source, example_inputs, model=model, config=config, dynamic_shapes="all" if resolved else None,
                verify=bool(resolved))
        if any(not decided.static for decided in sim.plan.values()):
            raise ConfigError("the config quantizes activations; give one of weights alone, such as vllm_w4a16")
        say_forecast(sim.simulation, progress=progress and not resolved)
        sim.compute_encodings(None, progress=progress)
        round_scales(sim)
        report = None
        layers = target.with_name(f"{target.name}.layers") if options.checkpoint_dir is None else None
        if resolved:
            assert data is not None
            report = apply_layerwise(
                sim, data, resolved, forward=forward, num_batches=num_batches, valid=valid, progress=progress,
                options=options if layers is None else replace(options, checkpoint_dir=layers))
        check(sim.simulation)
        with TRACING, bounded(sim.model):
            checkpoint.export(sim.model, stage, progress=progress)
            if verify:
                checkpoint.compare_with_simulation(stage, sim.model, progress=progress)
        for path in files_beside(source):
            if not (stage / path.name).exists():
                shutil.copy(path, stage / path.name)
    if layers is not None:
        shutil.rmtree(layers, ignore_errors=True)
    return report


TOKENS = {"input_ids": torch.arange(8)[None], "use_cache": False}
"""What a decoder of transformers runs on."""
