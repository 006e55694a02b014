"""The checkpoint format compressed-tensors of Hugging Face, which vLLM loads: integer weights of linear layers.

``model.safetensors`` holds the state_dict of the float model, with four tensors in place of each quantized weight:
``weight_packed`` int32 [out, words], the codes of a row side by side, each plus ``2^(bits - 1)``, the first in the
lowest bits; ``weight_scale`` float32 [out, blocks] or [1]; ``weight_zero_point`` of asymmetric ones, int32
[words, blocks] packed along the output channels, int8 [1] per tensor; ``weight_shape`` int64 [2]. ``config.json`` holds
the ``quantization_config`` (``pack-quantized``), which belongs into the config of the Hugging Face model.

Seen in compressed-tensors 0.20: (code − zero point) · scale in the dtype of the scale, here float32.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, fx, nn

from qtk.core.dtypes import FloatDtype
from qtk.core.encoding import Encoding
from qtk.core.granularity import WHOLE, PerBlock, PerChannel, PerTensor
from qtk.core.spec import QuantSpec
from qtk.errors import ExportError
from qtk.graph.graphs import graphs
from qtk.graph.insert import QUANTIZERS, quantizer_nodes
from qtk.graph.parameter_readers import memory_of, parameter_readers
from qtk.graph.sites import SITE, label
from qtk.numerics.bit_packing import pack_bits, unpack_bits
from qtk.numerics.codes import codes_of
from qtk.operators.op_table import row_of
from qtk.operators.targets import attribute
from qtk.quantizers.quantizer import Mode, Quantizer

STATE_FILE, CONFIG_FILE = "model.safetensors", "config.json"
BITS, WORD = (4, 8), 32
WHOLE_MODEL = "Linear"
"""The target of a model that is one linear layer: its path is empty, and targets are paths or classes."""

LISTED = 10
"""Sites that an error lists."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    """The quantized weight of a linear layer.

    Args:
        name: of the weight, ``blocks.0.up.weight``.
        weight: the parameter.
        encoding: its encoding.
    """

    name: str
    weight: Tensor
    encoding: Encoding


def export(model: nn.Module, folder: Path) -> None:
    """Writes a simulated model of which nothing is quantized but weights of linear layers, in 4 or 8 bits.

    Raises: ExportError naming the sites that the format cannot hold, or if a file cannot be written.
    """
    layers = {layer.name: layer for layer in _packed_linears(model)}
    packed = {memory_of(tensor): name for name, tensor in model.state_dict().items() if name in layers}
    tensors: dict[str, Tensor] = {}
    held: dict[object, set[object]] = {}
    for name, tensor in model.state_dict().items():
        if QUANTIZERS in name.split("."):
            continue
        owner = packed.get(memory_of(tensor), name)
        if name not in layers and owner != name:
            raise ExportError(f"{name} shares the memory of {owner}, which compressed-tensors holds as codes for that "
                              "layer alone; give it a weight of its own before QuantSim, or export another format")
        view = tensor.storage_offset(), tensor.shape, tensor.stride()
        views = held.setdefault(memory_of(tensor), set())
        if name in layers:
            tensors |= {f"{name}_{key}": each for key, each in _tensors(layers[name]).items()}
        elif view not in views or not tensor.numel():  # a tied tensor is stored once
            tensors[name] = tensor.clone() if views else tensor.contiguous()
        views.add(view)
    try:
        save_file(tensors, folder / STATE_FILE, metadata={"format": "pt"})
    except SafetensorError as error:  # a full disk, among others
        raise ExportError(f"cannot write {folder / STATE_FILE}: {error}") from error
    text = json.dumps({"quantization_config": _config(list(layers.values()))}, indent=1)
    (folder / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")


def read(folder: Path) -> dict[str, tuple[Tensor, Tensor | None, Tensor]]:
    """Name of each quantized weight → scales, zero points and codes in files that ``export`` wrote.

    Codes and zero points are signed, int32: those of an unsigned format less ``2^(bits - 1)``.

    Raises: ExportError if a file is missing or malformed.
    """
    try:
        tensors = load_file(folder / STATE_FILE)
        groups = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))["quantization_config"]["config_groups"]
        return {name: _read(tensors, name, group["weights"])
                for group in groups.values() for path in group["targets"]
                for name in ["weight" if path == WHOLE_MODEL and "weight_packed" in tensors else f"{path}.weight"]}
    except (OSError, SafetensorError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise ExportError(f"cannot read {folder} as compressed-tensors: {error}") from error


def compare_with_simulation(folder: Path, model: nn.Module) -> None:
    """Reads the files back and compares scales, zero points and codes with the simulation.

    Raises: ExportError naming the weight of the first difference.
    """
    stored = read(folder)
    layers = {layer.name: layer for layer in _packed_linears(model)}
    if stored.keys() != layers.keys():
        raise ExportError(f"{sorted(stored.keys() ^ layers.keys())[0]} is in one of file and simulation alone")
    for name, (scale, zero_point, codes) in stored.items():
        own, weight = layers[name].encoding, layers[name].weight
        shift, no_zeros = _shift(own.spec), torch.empty(0)
        zeros = no_zeros if own.zero_point is None else own.zero_point.cpu().flatten() - shift
        if not (torch.equal(scale.flatten(), own.scale.cpu().flatten())
                and torch.equal(no_zeros if zero_point is None else zero_point.flatten(), zeros)
                and torch.equal(codes, codes_of(weight, own).cpu().int() - shift)):
            raise ExportError(f"{name}: its scales, zero points or integers are not those of the simulation")


def _packed_linears(model: nn.Module) -> list[PackedLinear]:
    """Raises: ExportError naming the sites that the format cannot hold."""
    layers: dict[str, PackedLinear] = {}
    findings: dict[str, str] = {}
    names = {memory_of(tensor): name for name, tensor in reversed(model.state_dict().items()) if tensor.numel()}
    readers = parameter_readers(model)
    for graph in graphs(model).values():
        for node, quantizer in quantizer_nodes(graph).items():
            if quantizer.mode is not Mode.SIMULATE or not node.users:
                continue
            site, source = str(label(node, SITE)), node.all_input_nodes[0]
            value = attribute(graph, str(source.target)) if source.op == "get_attr" else None
            reason = _reason(node, value, quantizer)
            if reason is not None or not isinstance(value, Tensor):
                findings[site] = str(reason)
                continue
            name, encoding = names.get(memory_of(value), ""), quantizer.encoding
            if readers[memory_of(value)] != {quantizer}:
                findings[site] = "is read in another format, or in float, too"
            elif name.rpartition(".")[2] != "weight":
                findings[site] = "is not the weight of a linear module"
            elif encoding is not None:
                layers[name] = PackedLinear(name, value.detach(), encoding)
    if findings:
        listed = [f"{site} {reason}" for site, reason in list(findings.items())[:LISTED]]
        listed += [f"and {len(findings) - LISTED} more"] if len(findings) > LISTED else []
        raise ExportError("\n  ".join(["compressed-tensors files hold weights of linear layers in 4 or 8 bits alone; "
                                       "leave these in float (activation_bits=None, rules with weight: float), "
                                       "or export formats=('onnx',):", *listed]))
    if not layers:
        raise ExportError("no weight of a linear layer is quantized; export formats=('onnx',)")
    return list(layers.values())


def _reason(node: fx.Node, value: object, quantizer: Quantizer) -> str | None:
    """Why the format cannot hold what a quantizer reads; ``None`` if it can, as far as the weight itself goes."""
    if not isinstance(value, Tensor):
        return "is an activation" if not quantizer.static else "is computed from parameters"
    for user in node.users:
        row = row_of(user)
        if row is None or row.kind != "linear" or user.args[1] is not node:
            return f"is read by {'another op' if row is None else row.kind}"
    spec, matrix = quantizer.spec, value.ndim == 2
    if isinstance(spec.dtype, FloatDtype) or spec.dtype.bits not in BITS:
        return f"has {spec.dtype} codes"
    match spec.granularity:
        case PerTensor():
            fits = True
        case PerChannel(axis):
            fits = axis % value.ndim == 0
        case PerBlock((1, size)):
            fits = size == WHOLE or size > 0
        case _:
            fits = False
    return None if fits and matrix else f"has scales {spec.granularity}"


def _tensors(layer: PackedLinear) -> dict[str, Tensor]:
    """The tensors in place of a weight, by the end of their names."""
    encoding, bits = layer.encoding, layer.encoding.spec.dtype.bits
    codes = codes_of(layer.weight, encoding)
    # adding 2^(bits - 1) to the signed codes of the format gives the codes of an unsigned one again
    unsigned = codes if not encoding.spec.dtype.signed else codes.to(torch.int16) + (1 << (bits - 1))
    tensors = {"packed": _pack_rows(unsigned, bits), "shape": torch.tensor(layer.weight.shape)}
    per_tensor = isinstance(encoding.spec.granularity, PerTensor)
    count = (1,) if per_tensor else (layer.weight.shape[0], -1)
    tensors["scale"] = encoding.scale.reshape(count).cpu()
    if encoding.zero_point is not None:
        zero_point = (encoding.zero_point - _shift(encoding.spec)).reshape(count)
        unsigned_zero_point = zero_point + (1 << (bits - 1))
        tensors["zero_point"] = zero_point.to("cpu", torch.int8) if per_tensor else (
            _pack_rows(unsigned_zero_point.t(), bits).t().contiguous())
    return tensors


def _shift(spec: QuantSpec) -> int:
    """What codes of a format are larger by than those of the signed one, as which they are stored."""
    return 0 if spec.dtype.signed else 1 << (spec.dtype.bits - 1)


def _pack_rows(codes: Tensor, bits: int) -> Tensor:
    """Shape: ``codes`` [rows, columns], unsigned; result int32 [rows, words]."""
    padded = nn.functional.pad(codes, (0, -codes.shape[1] % (WORD // bits)))
    return pack_bits(padded, bits).view(torch.int32).reshape(codes.shape[0], -1)


def _unpack_rows(words: Tensor, bits: int, columns: int) -> Tensor:
    """The inverse of ``_pack_rows``, less ``2^(bits - 1)``; int32."""
    count = words.shape[1] * (WORD // bits)
    codes = unpack_bits(words.contiguous().view(torch.uint8).flatten(), bits, words.shape[0] * count, signed=False)
    return codes.reshape(-1, count)[:, :columns] - (1 << (bits - 1))


def _config(layers: list[PackedLinear]) -> dict[str, object]:
    """The ``quantization_config``: one group of layers for each kind of weight."""
    groups: dict[str, tuple[dict[str, object], list[str]]] = {}
    for layer in layers:
        weights = _weights(layer)
        groups.setdefault(json.dumps(weights), (weights, []))[1].append(layer.name.rpartition(".")[0] or WHOLE_MODEL)
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{index}": {"targets": targets, "weights": weights, "input_activations": None,
                               "output_activations": None}
            for index, (weights, targets) in enumerate(groups.values())
        },
        "ignore": [],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _weights(layer: PackedLinear) -> dict[str, object]:
    spec = layer.encoding.spec
    size = None
    match spec.granularity:
        case PerTensor():
            strategy = "tensor"
        case PerBlock() if layer.encoding.scale.shape[1] > 1:
            strategy, size = "group", layer.weight.shape[1] // layer.encoding.scale.shape[1]
        case _:
            strategy = "channel"
    return {"num_bits": spec.dtype.bits, "type": "int", "symmetric": spec.symmetric, "strategy": strategy,
            **({} if size is None else {"group_size": size}), "dynamic": False}


def _read(
    tensors: dict[str, Tensor], name: str, weights: dict[str, object]
) -> tuple[Tensor, Tensor | None, Tensor]:
    bits, symmetric, strategy = int(str(weights["num_bits"])), bool(weights["symmetric"]), weights["strategy"]
    rows, columns = tensors[f"{name}_shape"].tolist()
    zero_point = None if symmetric else tensors[f"{name}_zero_point"]
    if zero_point is not None:
        zero_point = zero_point.int() if strategy == "tensor" else _unpack_rows(zero_point.t(), bits, rows).t()
    return tensors[f"{name}_scale"], zero_point, _unpack_rows(tensors[f"{name}_packed"], bits, columns)
