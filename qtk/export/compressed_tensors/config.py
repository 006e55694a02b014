"""``config.json``: the model's own, with the ``quantization_config`` by which servers and transformers load it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence, Set
from pathlib import Path
from typing import Any

import torch

from qtk.export.compressed_tensors.checkpoint import StoredLayer
from qtk.export.compressed_tensors.library import library
from qtk.export.compressed_tensors.original import OriginalModel

CONFIG_FILE, GENERATION_FILE = "config.json", "generation_config.json"
LINEAR = "Linear"
"""The target that stands for every linear module that is not ignored."""

PATTERN = "re:"
"""How a target begins that is a regular expression of paths."""

EXPERTS, NUMBER = ".experts.", r"\d+"


def write(
    layers: Sequence[StoredLayer], in_float: Iterable[str], original: OriginalModel | None, dtype: torch.dtype,
    folder: Path, cache: object | None = None,
) -> None:
    """Writes the configs of a checkpoint.

    Args:
        layers: the quantized layers.
        in_float: paths of linear modules that are not quantized.
        original: the model's class; ``None``: it is not one of transformers.
        dtype: of the model.
        folder: where to.
        cache: the library's arguments of keys and values; ``None``: they are float.
    """
    own = {} if original is None else {**original.config(), "dtype": str(dtype).removeprefix("torch.")}
    merged = {**own, "quantization_config": quantization_config(layers, in_float, cache)}
    (folder / CONFIG_FILE).write_text(json.dumps(merged, indent=1) + "\n", encoding="utf-8")
    if original is not None and hasattr(original.generation_config, "save_pretrained"):
        original.generation_config.save_pretrained(folder)


def quantization_config(
    layers: Sequence[StoredLayer], in_float: Iterable[str], cache: object | None = None
) -> dict[str, object]:
    """One group of layers for each scheme; the largest group targets every ``Linear`` that is not ignored.

    It is the last: the library takes the first target that fits a layer, and warns of targets that fit none then.
    """
    groups: dict[str, list[StoredLayer]] = {}
    for layer in layers:
        groups.setdefault(f"{layer.is_transposed} {layer.scheme.model_dump_json()}", []).append(layer)
    ordered = sorted(groups.values(), key=len, reverse=True)[::-1]
    paths, ignored = [[layer.path for layer in members] for members in ordered], sorted(set(in_float))
    every = {path for each in (*paths, ignored) for path in each}
    schemes = {f"group_{index}": members[0].scheme.model_copy(update={
        "targets": [LINEAR] if index == len(ordered) - 1 and not members[0].is_transposed else _targets(own, every)
    }) for index, (members, own) in enumerate(zip(ordered, paths, strict=True))}
    formats = {scheme.format for scheme in schemes.values()}
    stored = next(iter(formats), "dense") if len(formats) < 2 else "mixed-precision"
    quantization = library().quantization
    config: dict[str, object] = quantization.QuantizationConfig(
        config_groups=schemes, format=getattr(stored, "value", stored), ignore=_targets(ignored, every),
        kv_cache_scheme=cache, quantization_status=quantization.QuantizationStatus.COMPRESSED,
    ).model_dump(mode="json")
    if any(layer.is_dequantized for layer in layers):
        config["dequantize"] = True
    return {**config, "version": str(library().__version__)}


def _targets(paths: Sequence[str], every: Set[str]) -> list[str]:
    """Paths; of experts patterns, by which transformers finds their scheme.

    A pattern stands for every number of experts, and of layers and projections too where all that it matches then is
    one of ``paths``.

    Args:
        paths: of the layers.
        every: paths of all layers.
    """
    own, targets = set(paths), dict[str, None]()
    others = [path for path in every - own if EXPERTS in path]
    taken: dict[str, bool] = {}
    for path in paths:
        if EXPERTS not in path:
            targets[path] = None
            continue
        before, _, behind = re.escape(path).rpartition(re.escape(EXPERTS))
        number, behind = re.split(r"(?<=\d)(?!\d)", behind, maxsplit=1) if behind[:1].isdigit() else ("", behind)
        of_experts = f"{before}{re.escape(EXPERTS)}{NUMBER if number else ''}{behind}"
        forms = (re.sub(r"\d+", lambda _: NUMBER, re.escape(path)), of_experts, re.escape(path))
        for form in forms:
            pattern = f"^{form}$"
            if pattern not in taken:
                taken[pattern] = any(re.match(pattern, other) for other in others)
            if not taken[pattern]:
                targets[f"{PATTERN}{pattern}"] = None
                break
    return list(targets)


def is_target(target: str, path: str) -> bool:
    """Says whether a group with ``target`` has the layer at ``path``; ``LINEAR``, of what no other has, is none."""
    return target == path or (target.startswith(PATTERN) and bool(re.match(target.removeprefix(PATTERN), path)))


def read(folder: Path) -> tuple[dict[str, Any], Any]:
    """Group name → scheme of a checkpoint's ``quantization_config``, and the arguments of its cache, or ``None``.

    Raises: OSError, LookupError or ValueError if there is none.
    """
    config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))["quantization_config"]
    config = {key: value for key, value in config.items() if key not in ("dequantize", "version")}
    found = library().quantization.QuantizationConfig(**config)
    return found.config_groups, found.kv_cache_scheme
