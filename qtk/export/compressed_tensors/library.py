"""The package compressed-tensors, which packs, unpacks and describes checkpoints: imported when it is used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from qtk.errors import ExportError

INSTALL = "pip install 'qtk[llm]'"

E8M0_BIAS = 127
"""What is added to the exponent of a power of two where it is stored as a byte (OCP Microscaling 1.0)."""


def library() -> Any:
    """The package. Raises: ExportError saying how to install it, where it cannot be imported."""
    try:
        import compressed_tensors.compressors
        import compressed_tensors.quantization
    except ImportError as error:
        raise ExportError("the format 'compressed_tensors' needs the packages compressed-tensors and transformers, "
                          f"{error.name} is missing; {INSTALL}") from error
    return compressed_tensors


def scheme_of(weights: Mapping[str, object], inputs: Mapping[str, object] | None, targets: list[str]) -> Any:
    """The library's ``QuantizationScheme``, with the format that the library stores such weights in.

    Args:
        weights: arguments of the weights' ``QuantizationArgs``.
        inputs: likewise of the inputs; ``None``: these are float.
        targets: what it is the scheme of.
    """
    quantization = library().quantization
    arguments = quantization.QuantizationArgs
    scheme = quantization.QuantizationScheme(
        targets=targets, weights=arguments(**weights),
        input_activations=None if inputs is None else arguments(**inputs),
    )
    from compressed_tensors.compressors.format import infer_module_format

    scheme.format = infer_module_format(torch.nn.Linear, scheme)
    return scheme


def has_rounded_cache(module: torch.nn.Module) -> bool:
    """Says whether the library, where transformers loads a checkpoint by it, rounds keys and values of an attention."""
    try:
        from compressed_tensors.quantization.lifecycle.initialize import is_cached_attention_module
    except ImportError:  # of another version
        return False
    found: bool = is_cached_attention_module(module)
    return found


def compressed(tensors: dict[str, Tensor], scheme: Any) -> dict[str, Tensor]:
    """A layer's tensors as they are stored, from ``weight``, ``weight_scale`` and so on; local names."""
    found: dict[str, Tensor] = _compressor(scheme).compress(tensors, scheme)
    return found


def codes_of_stored(tensors: Mapping[str, Tensor], scheme: Any) -> Tensor:
    """Returns what a layer's stored codes stand for with scales of 1: codes less zero points, float32.

    Shape: result as the weight.
    """
    unit = {name: each if name not in ("weight_scale", "weight_global_scale") else torch.full_like(each, E8M0_BIAS)
            if each.dtype == torch.uint8 else torch.ones_like(each, dtype=torch.float32)
            for name, each in tensors.items()}
    found: Tensor = _compressor(scheme).decompress(unit, scheme)["weight"]
    return found.float()


def scales_of_stored(scale: Tensor) -> Tensor:
    """The scales of a layer's weight, float32: of exponents, as MX formats store them, the powers of two."""
    return torch.exp2(scale.float() - E8M0_BIAS) if scale.dtype == torch.uint8 else scale.float()


def zero_points_of_stored(tensors: Mapping[str, Tensor], scheme: Any) -> Tensor | None:
    """The zero points of a layer's weight, unpacked; ``None`` if it has none."""
    if "weight_zero_point" not in tensors:
        return None
    found: Tensor = _compressor(scheme).decompress(dict(tensors), scheme).get(
        "weight_zero_point", tensors["weight_zero_point"])
    return found


def _compressor(scheme: Any) -> Any:
    return library().compressors.BaseCompressor.get_value_from_registry(str(getattr(scheme.format, "value",
                                                                                     scheme.format)))
