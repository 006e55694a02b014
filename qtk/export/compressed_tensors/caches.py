"""The scales of keys and values, ``k_scale`` and ``v_scale`` of the module of an attention, as servers read them.

A server takes a missing scale for 1.0, without a word: what has no name, or no scale, is an error here.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from qtk.core.dtypes import FloatDtype
from qtk.errors import ExportError
from qtk.export.compressed_tensors.arguments import Unsuited, cache_arguments
from qtk.export.compressed_tensors.library import has_rounded_cache, library
from qtk.export.compressed_tensors.original import OriginalModel
from qtk.graph.attention import attentions, cache_quantizers, is_assembled
from qtk.graph.flow import Flow
from qtk.graph.graphs import roots
from qtk.graph.sites import OWNER, label
from qtk.quantizers.quantizer import Mode, Quantizer

NAMES = KEYS, VALUES = "k_scale", "v_scale"

LAYER = "layer_idx"
"""Attribute of the attentions of transformers that have a cache: which of its layers is theirs."""


def caches_of(model: nn.Module) -> dict[str, list[Quantizer]]:
    """Name of the scale of the keys, or values, of each attention → what quantizes them; empty without any.

    Raises: ExportError naming an attention whose cache holds something else, from which its keys are assembled.
    """
    found: dict[str, list[Quantizer]] = {}
    for graph in roots(model).values():
        flow = Flow(graph.graph, with_excluded=True)
        for reads in attentions(graph.graph, flow):
            for name, operand in zip(NAMES, (reads.keys, reads.values), strict=True):
                own = [each for each in cache_quantizers(flow, operand) if each.mode is Mode.SIMULATE]
                if own and is_assembled(flow, reads.keys):
                    raise ExportError(
                        f"the keys of {_path(operand.port.user)} are assembled from several layers, as from "
                        f"the latent of DeepSeek's attention: servers cache what they are made from, and would take "
                        f"{' and '.join(NAMES)} for its scales; take kv_cache out of the config")
                known = found.setdefault(f"{_path(operand.port.user)}.{name}", [])
                known += [each for each in own if each not in known]
    return found if any(found.values()) else {}


def _path(op: fx.Node) -> str:
    return re.sub(r"@\d+", "", label(op, OWNER) or "")


def scales_of(
    caches: Mapping[str, Sequence[Quantizer]], original: OriginalModel | None, dtype: torch.dtype
) -> tuple[Any, dict[str, Tensor]]:
    """The library's arguments of a checkpoint's cache, ``None`` without one, and its scales by name.

    Attention of transformers that has no cache, as of an encoder of images, has no scales.

    Shape: a scale [1], or [heads, 1, 1].

    Args:
        caches: as from ``caches_of``.
        original: the model's class; ``None``: it is not one of transformers.
        dtype: of the scales.

    Raises: ExportError if the format, or a server, has no such scales, or no name for them.
    """
    arguments: dict[str, dict[str, object]] = {}
    scales: dict[str, Tensor] = {}
    for name, quantizers in caches.items():
        if not _has_cache(original, name):
            continue
        first = _one(name, quantizers)
        try:
            arguments[name] = cache_arguments(first.spec)
        except Unsuited as reason:
            raise ExportError(f"{first.site}, of {name}, {reason}") from None
        assert first.encoding is not None
        scale = first.encoding.scale.cpu().to(dtype).flatten()
        scales[name] = scale if scale.numel() == 1 else scale.reshape(-1, 1, 1)
    if caches and not scales:
        raise ExportError("no attention of this model has a cache, so that servers have no names for the scales of its "
                          "keys and values; take kv_cache out of the config")
    if not scales:
        return None, {}
    first_name, *others = arguments
    for name in others:
        if arguments[name] != arguments[first_name]:
            raise ExportError(f"{name} is quantized otherwise than {first_name}, and a checkpoint has one scheme for "
                              "all caches; give all layers one kv_cache")
    return (library().quantization.QuantizationArgs(**arguments[first_name]),
            scales if original is None else original.stored(scales))


def warn_of_caches(
    caches: Mapping[str, Sequence[Quantizer]], original: OriginalModel | None, scales: Mapping[str, Tensor]
) -> None:
    """Warns of scales that are rounded, of attention without a cache, and of codes that servers do not have.

    Args:
        caches: as for ``scales_of``.
        original: likewise.
        scales: as they are stored.
    """
    quantizers = {name: own[0] for name, own in caches.items() if own}
    without = [name for name in quantizers if not _has_cache(original, name)]
    if without:
        warnings.warn(f"{without[0]} and {len(without) - 1} more are of attention that has no cache, which servers do "
                      "not round; the file has no scales for it", stacklevel=3)
    own = [each for name, each in quantizers.items() if name not in without and each.encoding is not None]
    if any(each.encoding is not None and not torch.equal(each.encoding.scale.cpu().flatten(), scale.float().flatten())
           for each, scale in zip(own, scales.values(), strict=True)):
        warnings.warn("scales of keys and values are rounded to the dtype of the model in the file; "
                      "qtk.round_scales(sim) before the export rounds the scales of the simulation", stacklevel=3)
    if any(not isinstance(each.spec.dtype, FloatDtype) for each in own):
        warnings.warn("vLLM, SGLang and TensorRT-LLM hold caches in fp8_e4m3 and may take the scales of int8 codes for "
                      "such; write kv_cache: {dtype: fp8_e4m3} for them", stacklevel=3)
    if original is not None and not all(has_rounded_cache(original.module.get_submodule(name.rpartition(".")[0]))
                                        for name in quantizers if name not in without):
        warnings.warn("transformers, as installed here, loads this folder with keys and values in float; servers round "
                      "them", stacklevel=3)


def _one(name: str, quantizers: Sequence[Quantizer]) -> Quantizer:
    """Returns what quantizes keys or values. Raises: ExportError if nothing does, several do, or there is no name."""
    path, _, kind = name.rpartition(".")
    what = "keys" if kind == KEYS else "values"
    if not quantizers:
        raise ExportError(f"the {what} of {path or 'the model'} are in float, and servers take a scale of 1.0 where a "
                          f"file has none; quantize the {what} of all layers (kv_cache), or of none")
    if not path:
        raise ExportError(f"servers read {kind} by the path of the module that computes attention, and this model "
                          "computes it outside of any; move it into a module of its own")
    for other in quantizers[1:]:
        if other.encoding is None or quantizers[0].encoding is None or not other.encoding.equals(
                quantizers[0].encoding):
            raise ExportError(f"{path} quantizes {what} in several ways ({quantizers[0].site}, {other.site}), and a "
                              f"file has one {kind} for it; compute each attention in a module of its own")
    return quantizers[0]


def _has_cache(original: OriginalModel | None, name: str) -> bool:
    """Says whether the module of a scale has a layer of a cache; true of models that are not of transformers."""
    path = name.rpartition(".")[0]
    return original is None or not path or getattr(original.module.get_submodule(path), LAYER, None) is not None
