"""Writes a simulated language model as a folder that transformers, vLLM and SGLang load, reads it back and compares.

``model.safetensors``, or shards with an index, hold the state_dict of the float model under the names that checkpoints
of its class have, with the library's tensors in place of each quantized weight; scales are in the dtype of the model.
``config.json`` is the model's own with a ``quantization_config``; ``generation_config.json`` and the files of a
tokenizer lie beside it. A model that is not one of transformers has the ``quantization_config`` alone in its config.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from tqdm import tqdm

from qtk.errors import ExportError
from qtk.export.compressed_tensors import checkpoint, config
from qtk.export.compressed_tensors.arguments import input_divisor, scale_matrices, signed_shift
from qtk.export.compressed_tensors.caches import NAMES, scales_of, warn_of_caches
from qtk.export.compressed_tensors.checkpoint import StoredLayer
from qtk.export.compressed_tensors.compatibility import warn_of_files
from qtk.export.compressed_tensors.layers import Layers, QuantizedLayer, layers_of
from qtk.export.compressed_tensors.library import codes_of_stored, library, scales_of_stored, zero_points_of_stored
from qtk.export.compressed_tensors.original import OriginalModel
from qtk.export.compressed_tensors.shards import Shards, readers
from qtk.numerics.codes import codes_of, values_of

CONFIG_FILE = config.CONFIG_FILE

TENSORS_OF_WEIGHT = 4
"""Packed codes, their shape, scales and zero points, or a divisor and a range of inputs."""

TWO_BITS = 2.0**-22
"""The last two bits of a float32."""


@dataclass(frozen=True, slots=True, eq=False)
class ReadLayer:
    """The numbers of a layer in a checkpoint.

    Args:
        codes: of the weight, less their zero points.
        scale: of the weight; of NVFP4 divided by the global scale.
        zero_point: of the weight, signed; ``None`` if symmetric.
        input_scale: of a static input; of an NVFP4 one its divisor, ``input_global_scale``.
        input_zero_point: likewise, signed.
        scheme: how weight and inputs are quantized, the library's.
        scale_tolerance: by how much a scale of the weight may differ, relatively.

    Shape: ``codes`` as the weight, float32; scales and zero points as the library stores them, unpacked.
    """

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None
    input_scale: Tensor | None
    input_zero_point: Tensor | None
    scheme: Any
    scale_tolerance: float = 0.0


def export(model: nn.Module, folder: Path, tokenizer: object | None = None, *, progress: bool = False) -> None:
    """Writes a simulated model of which linear layers alone are quantized.

    Warns where scales are rounded to the dtype of the model, and of what servers or transformers do not load.

    Raises: ExportError naming the sites that the format cannot hold; if the library is missing; if a file cannot be
        written.
    """
    library()
    save_tokenizer = getattr(tokenizer, "save_pretrained", None)
    if tokenizer is not None and not callable(save_tokenizer):
        raise ExportError(f"a tokenizer writes its files by save_pretrained(folder), a {type(tokenizer).__name__} has "
                          "no such method; pass one of transformers")
    layers, original = layers_of(model), OriginalModel.of(model)
    tensors = checkpoint.other_tensors(model, layers.quantized)
    tensors = tensors if original is None else original.stored(tensors)
    dtype = _dtype(layers, model)
    cache, scales = scales_of(layers.caches, original, dtype)
    warn_of_files(layers)
    warn_of_caches(layers.caches, original, scales)
    num_weights = sum(len(each.weight) if each.axes.stack else 1 for each in layers.quantized.values())
    divisors, stored = layers.global_scales(), list[StoredLayer]()
    shards = Shards(folder, len(tensors) + TENSORS_OF_WEIGHT * num_weights + len(scales))
    for name, tensor in tensors.items():
        shards.add(name, tensor)
    for name, layer in tqdm(layers.quantized.items(), "writing", unit="layer", leave=False, disable=not progress):
        for each in checkpoint.stored_layers(layer, original, divisors.get(name)):
            for end, tensor in each.tensors.items():
                shards.add(f"{each.path}.{end}".lstrip("."), tensor)
            stored.append(replace(each, tensors={}))
    for name, tensor in scales.items():
        shards.add(name, tensor)
    shards.end()
    config.write(stored, _paths_in_float(layers, original, stored), original, dtype, folder, cache)
    if callable(save_tokenizer):
        save_tokenizer(str(folder))


def _dtype(layers: Layers, model: nn.Module) -> torch.dtype:
    """The dtype of the model: of the first quantized layer, else of the first floating-point parameter."""
    weights = (layer.weight for layer in layers.quantized.values())
    return next((each.dtype for each in (*weights, *model.parameters()) if each.is_floating_point()), torch.float32)


def read(folder: Path) -> dict[str, ReadLayer]:
    """Path of each quantized layer → its numbers in files that ``export`` wrote.

    Raises: ExportError if a file is missing or malformed.
    """
    with _layers(folder) as layers:
        return {path: read(tensors()) for path, (tensors, read) in layers.items()}


_Tensors: TypeAlias = dict[str, Tensor]


@contextmanager
def _layers(folder: Path) -> Iterator[Mapping[str, tuple[Callable[[], _Tensors], Callable[[_Tensors], ReadLayer]]]]:
    """Path of each quantized layer → what reads its tensors, and its numbers from these.

    Raises: ExportError as ``read``.
    """
    with _reading(folder):
        tensors = readers(folder)
        schemes = list(config.read(folder)[0].values())
        by_path: dict[str, dict[str, Callable[[], Tensor]]] = {}
        for name, tensor in tensors.items():
            path, _, end = name.rpartition(".")
            by_path.setdefault(path, {})[end] = tensor

        def tensors_of(path: str) -> _Tensors:
            return {end: tensor() for end, tensor in by_path[path].items()}

        yield {path: (partial(tensors_of, path), lambda tensors, path=path: _read(tensors, _scheme(path, schemes)))  # type: ignore[misc]
               for path, own in by_path.items() if "weight_scale" in own}


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    try:
        yield
    except ExportError:
        raise
    except (OSError, SafetensorError, LookupError, TypeError, ValueError, RuntimeError, AssertionError) as error:
        raise ExportError(f"cannot read {folder} as compressed-tensors: {error}") from error


def read_caches(folder: Path) -> tuple[Any, dict[str, Tensor]]:
    """The arguments of the cache of a checkpoint, ``None`` if it is float, and its scales by name.

    Raises: ExportError if a file is missing or malformed.
    """
    with _reading(folder):
        return config.read(folder)[1], {name: tensor() for name, tensor in readers(folder).items()
                                        if name.rpartition(".")[2] in NAMES}


def compare_with_simulation(folder: Path, model: nn.Module, *, progress: bool = False) -> None:
    """Reads the files back and compares schemes, codes, scales and zero points with the simulation.

    All tensors are compared with what the simulation gives now. What the library makes of the tensors is compared with
    the numbers of the simulation: of a large weight, of its first outputs.

    The scales of NVFP4, which the file divides by a global scale and the simulation multiplies by its inverse, may
    differ in their last two bits.

    Raises: ExportError naming the layer of the first difference.
    """
    original, layers = OriginalModel.of(model), layers_of(model)
    divisors = layers.global_scales()
    with _layers(folder) as found:
        left = dict(found)
        own_layers = layers.quantized.values()
        for layer in tqdm(own_layers, "reading back", unit="layer", leave=False, disable=not progress):
            part = checkpoint.first_outputs(layer)
            expected = _simulated(part, original)
            for own in checkpoint.stored_layers(layer, original, divisors.get(layer.name)):
                if own.path not in left:
                    raise ExportError(f"{own.path} is in the simulation alone")
                tensors, read_layer = left.pop(own.path)
                stored, name = tensors(), own.path or "weight"
                found_layer = read_layer(stored if part is layer else checkpoint.of_outputs(stored, part))
                _compare_schemes(name, found_layer, expected[own.path])
                if not _have_equal_bits(stored, own.tensors) or not _equal(found_layer, expected[own.path]):
                    raise ExportError(f"{name}: the scales, zero points or integers differ from the simulation")
    if left:
        raise ExportError(f"{next(iter(left))} is in the file alone")
    (cache, scales), (own, own_scales) = read_caches(folder), scales_of(layers.caches, original, _dtype(layers, model))
    if cache != own or scales.keys() != own_scales.keys():
        raise ExportError(f"the config has the cache {cache} with {len(scales)} scales, the simulation {own} with "
                          f"{len(own_scales)}")
    for name, scale in scales.items():
        if not torch.equal(scale, own_scales[name]):
            raise ExportError(f"{name} differs from the scale in the simulation")


def _compare_schemes(name: str, layer: ReadLayer, expected: ReadLayer) -> None:
    if _arguments(layer.scheme) != _arguments(expected.scheme):
        raise ExportError(f"{name}: the config has {_arguments(layer.scheme)}, the simulation "
                          f"{_arguments(expected.scheme)}")


def _have_equal_bits(stored: _Tensors, own: _Tensors) -> bool:
    """Says whether a file has these tensors of a weight and its input, and no others of them; a bias is none."""
    return {end for end in stored if end.startswith(("weight", "input"))} == own.keys() and all(
        (each.dtype, each.shape) == (stored[end].dtype, stored[end].shape)
        and torch.equal(each.flatten().view(torch.uint8), stored[end].flatten().view(torch.uint8))
        for end, each in own.items())


def _simulated(layer: QuantizedLayer, original: OriginalModel | None) -> dict[str, ReadLayer]:
    """Path of each layer in the checkpoint → its numbers in the simulation, scales in the dtype of the model."""
    encoding, dtype = layer.encoding.to(torch.device("cpu")), layer.weight.dtype
    middle = encoding.spec.middle_code if encoding.zero_point is None else encoding.zero_point
    zero = torch.as_tensor(middle).expand(encoding.scale.shape)
    unit = replace(encoding, scale=torch.ones_like(encoding.scale))
    unshifted = values_of(codes_of(layer.weight.cpu(), encoding), unit)
    own_input = None if layer.inputs is None else layer.inputs.encoding
    input_scale = None if own_input is None else own_input.scale.cpu().to(dtype).float() if (
        own_input.spec.scale_format is None) else input_divisor(own_input)
    input_zero_point = None if own_input is None or own_input.zero_point is None else (
        own_input.zero_point.cpu() - signed_shift(own_input.spec))
    codes = checkpoint.by_layer(layer, unshifted, "weight", original)
    is_stored = encoding.spec.scale_format is None
    scales = checkpoint.by_layer(layer, _matrices(layer, encoding.scale.to(dtype).float() if is_stored
                                                  else encoding.scale), "weight_scale", original)
    zeros: dict[str, Tensor] = {} if encoding.zero_point is None else checkpoint.by_layer(
        layer, _matrices(layer, zero - signed_shift(encoding.spec)), "weight_zero_point", original)
    return {name.removesuffix("weight").removesuffix("."): ReadLayer(
        codes[name], scales[name], zeros.get(name), input_scale, input_zero_point,
        checkpoint.scheme_of_layer(layer)) for name in codes}


def _matrices(layer: QuantizedLayer, numbers: Tensor) -> Tensor:
    return scale_matrices(numbers, layer.encoding.spec, layer.axes, tuple(layer.weight.shape))


def _read(tensors: dict[str, Tensor], scheme: Any) -> ReadLayer:
    scale, divisor, *of_inputs = (tensors.get(f"{each}_scale")
                                  for each in ("weight", "weight_global", "input", "input_global"))
    inputs = next((each for each in of_inputs if each is not None), None)
    assert scale is not None
    return ReadLayer(
        codes_of_stored(tensors, scheme), scales_of_stored(scale) / (1.0 if divisor is None else divisor),
        zero_points_of_stored(tensors, scheme), None if inputs is None else inputs.float(),
        tensors.get("input_zero_point"), scheme, 0.0 if divisor is None else TWO_BITS,
    )


def _scheme(path: str, schemes: Sequence[Any]) -> Any:
    """The scheme of a layer: its target is the path or a pattern of it, else of all linear layers.

    Raises: LookupError if there is none, or several.
    """
    for is_own in (partial(config.is_target, path=path), config.LINEAR.__eq__):
        found = [scheme for scheme in schemes if any(is_own(target) for target in scheme.targets)]
        if len(found) > 1:
            raise LookupError(f"{path} is a target of {len(found)} groups")
        if found:
            return found[0]
    raise LookupError(f"{path} is a target of no group")


def _arguments(scheme: Any) -> dict[str, object]:
    """Returns what a scheme says but for its targets: of weights and inputs, and the format."""
    found: dict[str, object] = scheme.model_dump(mode="json", exclude={"targets"}, exclude_none=True)
    return found


def _equal(layer: ReadLayer, expected: ReadLayer) -> bool:
    pairs = [(layer.zero_point, expected.zero_point), (layer.input_scale, expected.input_scale),
             (layer.input_zero_point, expected.input_zero_point)]
    scales = layer.scale.flatten(), expected.scale.flatten()
    if scales[1].numel() == 1:
        scales = scales[0], scales[1].expand(scales[0].shape)
    return (torch.equal(layer.codes, expected.codes) and scales[0].shape == scales[1].shape
            and bool(((scales[0] - scales[1]).abs() <= layer.scale_tolerance * scales[1]).all())
            and all(_same(*pair) for pair in pairs))


def _same(number: Tensor | None, expected: Tensor | None) -> bool:
    if number is None or expected is None:
        return number is expected
    return torch.equal(number.flatten().double(), expected.flatten().double())


def _paths_in_float(layers: Layers, original: OriginalModel | None, stored: Sequence[StoredLayer]) -> list[str]:
    """The linear modules that are not quantized, as the model and as its checkpoints name them."""
    quantized = {layer.path for layer in layers.quantized.values()} | {each.path for each in stored}
    names = list(layers.in_float)
    if original is not None:
        names += [f"{path}.weight" for path in original.linear_modules()]
        shapes = original.module.state_dict()  # on the meta device: stacks of experts are taken apart by their shape
        names += list(original.stored({name: shapes[name] for name in names if name in shapes}))
    paths = [name.removesuffix(".weight") for name in dict.fromkeys(names) if name.endswith(".weight")]
    return [path for path in paths if path not in quantized]
