"""Makes the tensors of a checkpoint: quantized layers as the library stores them, all other tensors unchanged."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from qtk.core.dtypes import DTYPES
from qtk.core.encoding import Encoding
from qtk.errors import ExportError
from qtk.export.compressed_tensors.arguments import (
    input_arguments,
    input_divisor,
    scale_matrices,
    signed_shift,
    weight_arguments,
)
from qtk.export.compressed_tensors.layers import QuantizedLayer
from qtk.export.compressed_tensors.library import compressed, scheme_of
from qtk.export.compressed_tensors.original import OriginalModel
from qtk.graph.insert import QUANTIZERS
from qtk.graph.parameter_readers import memory_of
from qtk.numerics.codes import codes_of, values_of
from qtk.numerics.effective import effective_scale

SCALES, SHAPE = ("weight_scale", "input_scale"), "weight_shape"
INT4, MIDDLE = DTYPES["int4"], 8
AT_ONCE = 1 << 18
"""Elements of a weight that are rounded and packed together: their float32 fit a cache."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredLayer:
    """One layer in a checkpoint.

    Args:
        path: of its module there.
        scheme: the library's, without targets.
        tensors: by the end of their names, ``weight_packed``, ``weight_scale`` and so on, as the library stores them.
        is_transposed: whether its weight is [in, out].
        is_dequantized: see ``QuantizedLayer``.
    """

    path: str
    scheme: Any
    tensors: dict[str, Tensor]
    is_transposed: bool = False
    is_dequantized: bool = False


def stored_layers(layer: QuantizedLayer, original: OriginalModel | None, divisor: Tensor | None) -> list[StoredLayer]:
    """The layers of a checkpoint that a quantized weight becomes: one, or one for each expert and projection.

    Args:
        layer: the weight.
        original: the model's class.
        divisor: of NVFP4 scales.

    Raises: ExportError if the weight is a stack, and checkpoints of the model hold no such layers one by one.
    """
    scheme = scheme_of_layer(layer)
    if _is_packed(layer, scheme):
        (name,) = by_layer(layer, layer.weight, "weight", original)
        return [StoredLayer(_module(name), scheme, _packed(layer))]
    parts = [_stored_layers(rows, original, divisor) for rows in _by_rows(layer)]
    return parts[0] if len(parts) == 1 else [_joined([each for (each,) in parts], layer)]


def first_outputs(layer: QuantizedLayer) -> QuantizedLayer:
    """The layer with its first outputs alone, if there are many, and outputs are stored one by one."""
    return _by_rows(layer)[0]


def of_outputs(tensors: Mapping[str, Tensor], part: QuantizedLayer) -> dict[str, Tensor]:
    """The stored tensors of a layer for its first outputs, which ``part`` has."""
    rows = len(part.weight)
    return {end: torch.tensor(part.weight.shape) if end == SHAPE else tensor[:rows] if end.startswith("weight")
            else tensor for end, tensor in tensors.items()}


def _by_rows(layer: QuantizedLayer) -> list[QuantizedLayer]:
    """The layer a few outputs at a time, whose numbers the caches hold: 3 times as fast; whole if that is another."""
    encoding, (rows, *_) = layer.encoding, layer.weight.shape
    at_once = max(1, AT_ONCE * rows // max(1, layer.weight.numel()))
    if layer.axes.stack or layer.is_transposed or encoding.zero_point is not None or at_once >= rows or (
            encoding.spec.scale_format is not None or encoding.scale.shape[:1] != (rows,)):
        return [layer]
    return [replace(layer, weight=layer.weight[each:each + at_once],
                    encoding=Encoding(encoding.spec, encoding.scale[each:each + at_once]))
            for each in range(0, rows, at_once)]


def _joined(parts: Sequence[StoredLayer], layer: QuantizedLayer) -> StoredLayer:
    tensors = {end: torch.tensor(layer.weight.shape) if end == SHAPE else
               torch.cat([part.tensors[end] for part in parts]) if end.startswith("weight") else first
               for end, first in parts[0].tensors.items()}
    return replace(parts[0], tensors=tensors)


def _stored_layers(layer: QuantizedLayer, original: OriginalModel | None, divisor: Tensor | None) -> list[StoredLayer]:
    encoding, shape = layer.encoding.to(torch.device("cpu")), tuple(layer.weight.shape)
    scheme = scheme_of_layer(layer)
    value = values_of(codes_of(layer.weight.cpu(), encoding), encoding)
    scale = scale_matrices(encoding.scale, encoding.spec, layer.axes, shape)
    zero_point = None if encoding.zero_point is None else (
        scale_matrices(encoding.zero_point, encoding.spec, layer.axes, shape) - signed_shift(encoding.spec))
    numbers = {"weight": value, "weight_scale": scale, "weight_zero_point": zero_point}
    parts: dict[str, dict[str, Tensor]] = {}
    for end, number in numbers.items():
        if number is not None:
            for name, part in by_layer(layer, number, end, original).items():
                parts.setdefault(name, {})[end] = part
    return [_stored(name, part, scheme, layer, divisor) for name, part in parts.items()]


def _is_packed(layer: QuantizedLayer, scheme: Any) -> bool:
    """Says whether a weight is one of symmetric codes of 4 bits, eight in an int32."""
    spec, weight = layer.encoding.spec, layer.weight
    return (weight.ndim == 2 and weight.shape[1] % 8 == 0 and layer.inputs is None and not layer.is_transposed
            and (spec.dtype, spec.symmetric, spec.scale_format) == (INT4, True, None)
            and scheme.weights.strategy in ("group", "channel") and sys.byteorder == "little")


def _packed(layer: QuantizedLayer) -> dict[str, Tensor]:
    """The tensors of such a weight, in a tenth of the library's time: codes with 8 added, the first the lowest bits."""
    spec, weight = layer.encoding.spec, layer.weight.detach().cpu()
    scale = layer.encoding.scale.cpu().reshape(len(weight), -1)
    packed = torch.empty(len(weight), weight.shape[1] // 8, dtype=torch.int32)
    at_once = max(1, AT_ONCE // weight.shape[1])
    for rows in (slice(begin, begin + at_once) for begin in range(0, len(weight), at_once)):
        steps = weight[rows].reshape(*scale[rows].shape, -1) / effective_scale(scale[rows])[..., None]
        codes = steps.nan_to_num_(nan=0.0).round_().clamp_(spec.qmin, spec.qmax).add_(MIDDLE).to(torch.int8)
        pairs = codes.flatten(1).view(torch.int16)
        packed[rows].view(torch.uint8).copy_(pairs >> 4 | pairs)
    return {"weight_scale": scale.to(weight.dtype), "weight_packed": packed, SHAPE: torch.tensor(weight.shape)}


def scheme_of_layer(layer: QuantizedLayer) -> Any:
    """The library's scheme of a quantized weight and its inputs, without targets."""
    weights = weight_arguments(layer.encoding, layer.axes, tuple(layer.weight.shape))
    return scheme_of(weights, None if layer.inputs is None else input_arguments(layer.inputs.spec), [])


def by_layer(layer: QuantizedLayer, number: Tensor, end: str, original: OriginalModel | None) -> dict[str, Tensor]:
    """Name of each layer's weight in the checkpoint → its part of a weight, or of its scales or zero points.

    Shape: ``number`` as the weight where ``end`` is ``weight``, else as from ``scale_matrices``; of the results the
    axes in the order of the weight's.

    Raises: ExportError if the weight is a stack, and checkpoints of the model hold no such layers one by one.
    """
    if end != "weight" and layer.is_transposed:
        number = number.mT
    if not layer.axes.stack:
        name = layer.name if original is None else next(iter(original.stored({layer.name: layer.weight})))
        return {name: number if end == "weight" else number[0]}
    if end != "weight" and number.numel() == 1:
        number = number.expand(layer.weight.shape[layer.axes.stack[0]], *layer.weight.shape[1:])
    parts = {layer.name: number} if original is None else original.stored({layer.name: number})
    if layer.name in parts or not all(part.ndim == 2 and name.endswith(".weight") for name, part in parts.items()):
        kind = "this model" if original is None else type(original.module).__name__
        raise ExportError(f"{layer.name} holds the weights of {layer.weight.shape[layer.axes.stack[0]]} experts, and "
                          f"checkpoints of {kind} have no names for them one by one; leave it in float by a rule "
                          "{match: {op: grouped_matmul}, weight: float}, or export another format")
    return parts


def _stored(
    name: str, part: Mapping[str, Tensor], scheme: Any, layer: QuantizedLayer, divisor: Tensor | None
) -> StoredLayer:
    weights = scheme.weights
    tensors = {"weight": part["weight"].contiguous(), "weight_scale": part["weight_scale"].contiguous()}
    if weights.strategy == "tensor":
        tensors["weight_scale"] = tensors["weight_scale"].flatten()[:1].clone()
    if "weight_zero_point" in part:
        zero_point = part["weight_zero_point"].to(torch.int8).contiguous()
        tensors["weight_zero_point"] = zero_point.flatten()[:1].clone() if weights.strategy == "tensor" else zero_point
    if divisor is not None:
        tensors |= {"weight_global_scale": divisor, "weight_scale": tensors["weight_scale"] * divisor}
    tensors = compressed(tensors, scheme)
    if layer.inputs is not None and not layer.inputs.spec.dynamic:
        encoding = layer.inputs.encoding
        assert encoding is not None
        if encoding.spec.scale_format is None:
            tensors["input_scale"] = encoding.scale.cpu().reshape(1)
        else:
            tensors["input_global_scale"] = input_divisor(encoding)
        if encoding.zero_point is not None:
            shifted = encoding.zero_point.cpu() - signed_shift(encoding.spec)
            tensors["input_zero_point"] = shifted.to(torch.int8).reshape(1)
    kind = layer.weight.dtype
    tensors = {end: each.to(kind) if end in SCALES and each.dtype == torch.float32 else each
               for end, each in tensors.items()}
    return StoredLayer(_module(name), scheme, tensors,
                       is_transposed=layer.is_transposed and not layer.axes.stack,
                       is_dequantized=layer.is_dequantized)


def _module(name: str) -> str:
    return name.removesuffix("weight").removesuffix(".")


def other_tensors(model: nn.Module, layers: Mapping[str, QuantizedLayer]) -> dict[str, Tensor]:
    """The state_dict of the float model without the weights of ``layers``; a tied tensor once.

    Raises: ExportError if another name has the memory of one of these weights.
    """
    state = {name: tensor for name, tensor in model.state_dict().items() if QUANTIZERS not in name.split(".")}
    packed = {memory_of(tensor): name for name, tensor in state.items() if name in layers}
    tensors: dict[str, Tensor] = {}
    held: dict[object, set[object]] = {}
    for name, tensor in state.items():
        owner = packed.get(memory_of(tensor), name)
        if name not in layers and owner != name:
            raise ExportError(f"{name} shares the memory of {owner}, which compressed-tensors holds as codes for that "
                              "layer alone; give it a weight of its own before QuantSim, or export another format")
        view = tensor.storage_offset(), tensor.shape, tensor.stride()
        views = held.setdefault(memory_of(tensor), set())
        if name not in layers and (view not in views or not tensor.numel()):  # a tied tensor is stored once
            tensors[name] = tensor
        views.add(view)
    return tensors
