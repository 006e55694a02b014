"""Warns of what a checkpoint does not hold as simulated, and of what servers or transformers do not load.

What transformers does was seen in 5.24 with compressed-tensors 0.20 (``benchmarks/models/bench_language_out.py``).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from qtk.core.dtypes import FloatDtype
from qtk.core.spec import ScaleFormat
from qtk.export.compressed_tensors.layers import Layers, have_same_encoding


def warn_of_files(layers: Layers) -> None:
    """Warns of rounded scales, of unequally quantized layers that servers fuse, and of what transformers lacks."""
    _warn_of_rounded_scales(layers)
    _warn_of_siblings(layers)
    _warn_of_what_transformers_loads(layers)


def _warn_of_rounded_scales(layers: Layers) -> None:
    """Warns where the dtype of the model does not hold the scales of the simulation."""
    rounded = []
    for layer in layers.quantized.values():
        inputs = None if layer.inputs is None else layer.inputs.encoding
        scales = [layer.encoding.scale] if layer.encoding.spec.scale_format is None else []
        scales += [] if inputs is None or inputs.spec.scale_format is not None else [inputs.scale]
        if any(not torch.equal(scale.to(layer.weight.dtype).float(), scale) for scale in scales):
            rounded.append(layer)
    if rounded:
        dtype = str(rounded[0].weight.dtype).removeprefix("torch.")
        warnings.warn(f"scales of {len(rounded)} layers ({rounded[0].name}, …) are rounded to {dtype}, the dtype of "
                      "the model, in the file; qtk.round_scales(sim) before the export rounds the scales "
                      "of the simulation too, which then equals the file", stacklevel=4)


def _warn_of_siblings(layers: Layers) -> None:
    """Warns of unequally quantized layers that read the same value, which servers fuse (queries, keys and values)."""
    divisors = layers.global_scales()
    for members in layers.siblings():
        first, others = members[0], members[1:]
        for other in others:
            if other.encoding.spec != first.encoding.spec or not have_same_encoding(other.inputs, first.inputs):
                warnings.warn(f"{first.name} and {other.name} read the same value and are quantized in different ways; "
                              "servers that fuse them (queries, keys and values; gate and up) refuse the file: give "
                              "them the same setting", stacklevel=4)
            elif first.name in divisors and not torch.equal(divisors[first.name], divisors[other.name]):
                warnings.warn(f"{first.name} and {other.name} read the same value and have other scales of the tensor, "
                              "of which servers that fuse them take one; run qtk.round_scales(sim) before the export",
                              stacklevel=4)


def _warn_of_what_transformers_loads(layers: Layers) -> None:
    """Warns of what servers load and transformers (seen in 5.24) does not, or otherwise."""
    every = layers.quantized.values()
    dequantized = [layer.name for layer in every if layer.is_dequantized]
    cast = [layer for layer in every if layer.encoding.spec.scale_format is not None
            and layer.weight.dtype != torch.bfloat16]
    if any(layer.inputs is not None for layer in cast) and not dequantized:
        warnings.warn("transformers makes bfloat16 of NVFP4 and MXFP4 weights and does not run them with quantized "
                      "inputs in a model of another dtype; simulate and export model.bfloat16()", stacklevel=4)
    elif any(layer.encoding.spec.scale_format is ScaleFormat.E4M3 or layer.axes.stack for layer in cast):
        warnings.warn("transformers rounds NVFP4 weights to bfloat16, and computes experts of MXFP4 in bfloat16, in a "
                      "model of another dtype too; simulate and export model.bfloat16() to get the numbers of the "
                      "simulation there", stacklevel=4)
    stacks = [layer for layer in every if layer.axes.stack]
    unread = [layer.name for layer in stacks if layer.encoding.spec.scale_format is ScaleFormat.E4M3
              or not layer.encoding.spec.symmetric
              or (layer.inputs is not None and not isinstance(layer.encoding.spec.dtype, FloatDtype))]
    if unread:
        warnings.warn(f"transformers does not load the experts of {unread[0]}{_more(unread)}, or gets other numbers: "
                      "of experts it reads symmetric integers with inputs in float, and fp8_e4m3; this file is for "
                      "servers", stacklevel=4)
    others = [layer.name for layer in stacks if layer.encoding.spec != stacks[0].encoding.spec]
    if others:
        warnings.warn(f"transformers reads all experts by one scheme, and {others[0]}{_more(others)} have another than "
                      f"{stacks[0].name}; this file is for servers", stacklevel=4)
    with_inputs = [layer for layer in every if layer.inputs is not None]
    lost = [layer.name for layer in with_inputs if layer.axes.stack or layer.is_transposed]
    if lost:
        warnings.warn(f"transformers loads {lost[0]}{_more(lost)} with inputs in float, "
                      "for it quantizes the inputs of nn.Linear alone; servers quantize the inputs of experts",
                      stacklevel=4)
    others = [layer.name for layer in with_inputs if layer.name not in lost]
    if dequantized and others:
        warnings.warn(f"transformers reads {dequantized[0]}{_more(dequantized)} alone when it dequantizes all weights "
                      f"as it loads, and so loads {others[0]}{_more(others)} with inputs in float; this file is for "
                      "servers", stacklevel=4)


def _more(names: Sequence[str]) -> str:
    return f" and {len(names) - 1} more" if names[1:] else ""
