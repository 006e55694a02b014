"""``config.json``: the model's own, with the ``quantization_config`` by which servers and transformers load it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from qtk.export.compressed_tensors.checkpoint import StoredLayer
from qtk.export.compressed_tensors.library import library
from qtk.export.compressed_tensors.original import Original

CONFIG_FILE, GENERATION_FILE = "config.json", "generation_config.json"
LINEAR = "Linear"
"""The target that stands for every linear module that is not ignored."""


def write(
    layers: Sequence[StoredLayer], in_float: Iterable[str], original: Original | None, dtype: torch.dtype, folder: Path
) -> None:
    """Writes the configs of a checkpoint.

    Args:
        layers: the quantized layers.
        in_float: paths of linear modules that are not quantized.
        original: the model's class; ``None``: it is not one of transformers.
        dtype: of the model.
        folder: where to.
    """
    own = {} if original is None else {**original.config(), "dtype": str(dtype).removeprefix("torch.")}
    merged = {**own, "quantization_config": quantization_config(layers, in_float)}
    (folder / CONFIG_FILE).write_text(json.dumps(merged, indent=1) + "\n", encoding="utf-8")
    if original is not None and hasattr(original.generation_config, "save_pretrained"):
        original.generation_config.save_pretrained(folder)


def quantization_config(layers: Sequence[StoredLayer], in_float: Iterable[str]) -> dict[str, object]:
    """One group of layers for each scheme; the one with most layers is that of all ``Linear`` that are not ignored."""
    groups: dict[str, list[StoredLayer]] = {}
    for layer in layers:
        groups.setdefault(f"{layer.is_transposed} {layer.scheme.model_dump_json()}", []).append(layer)
    ordered = sorted(groups.values(), key=len, reverse=True)
    schemes = {f"group_{index}": members[0].scheme.model_copy(update={
        "targets": [LINEAR] if index == 0 and not members[0].is_transposed else _targets(members)
    }) for index, members in enumerate(ordered)}
    formats = {scheme.format for scheme in schemes.values()}
    stored = next(iter(formats)) if len(formats) == 1 else "mixed-precision"
    quantization = library().quantization
    config: dict[str, object] = quantization.QuantizationConfig(
        config_groups=schemes, format=getattr(stored, "value", stored), ignore=sorted(set(in_float)),
        quantization_status=quantization.QuantizationStatus.COMPRESSED,
    ).model_dump(mode="json")
    if any(_is_dequantized(layer) for layer in layers):
        config["dequantize"] = True
    return {**config, "version": str(library().__version__)}


def _is_dequantized(layer: StoredLayer) -> bool:
    """Whether transformers reads a layer alone when it dequantizes it as it loads: others are no ``nn.Linear``, or have
    packed zero points, for which its modules have no room (seen in 5.24). Quantized inputs are lost so.
    """
    weights, inputs = layer.scheme.weights, layer.scheme.input_activations
    return layer.is_transposed or (inputs is None and not weights.symmetric and weights.strategy != "tensor")


def _targets(layers: Sequence[StoredLayer]) -> list[str]:
    """Paths; of experts a pattern, by which transformers finds their scheme."""
    paths = [layer.path for layer in layers]
    patterns = {re.sub(r"\d+", r"\\d+", re.escape(path)) for path in paths if ".experts." in path}
    return [*(path for path in paths if ".experts." not in path), *(f"re:^{pattern}$" for pattern in sorted(patterns))]


def read(folder: Path) -> dict[str, Any]:
    """Group name → scheme of a checkpoint's ``quantization_config``, and whether it is the one of other linear modules.

    Raises: OSError, LookupError or ValueError if there is none.
    """
    config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))["quantization_config"]
    config = {key: value for key, value in config.items() if key not in ("dequantize", "version")}
    found: dict[str, Any] = library().quantization.QuantizationConfig(**config).config_groups
    return found
