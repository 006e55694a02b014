"""Copies a GGUF file with some of its tensors replaced by quantized ones, and reads tensors back."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qtk.errors import ExportError
from qtk.export.gguf_blocks import GgufType

INSTALL = "pip install 'qtk[llm]'"
ARCHITECTURE, FILE_TYPE, VERSION = "general.architecture", "general.file_type", "general.quantization_version"
SUFFIXES = (".weight", ".bias")
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


def library() -> Any:
    """The package gguf. Raises: ExportError saying how to install it, where it cannot be imported."""
    try:
        import gguf
    except ImportError as error:
        raise ExportError(f"GGUF files need the package gguf, {error.name} is missing; {INSTALL}") from error
    return gguf


class Template:
    """A GGUF file whose metadata and other tensors are kept.

    Args:
        path: the file, as llama.cpp's ``convert_hf_to_gguf.py`` writes it.

    Raises: ExportError if it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path, gguf = path, library()
        try:
            self._reader = gguf.GGUFReader(path)
            fields = self._reader.fields
            self.architecture = str(fields[ARCHITECTURE].contents())
            blocks = fields.get(f"{self.architecture}.block_count")
            names = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
            self._names = None if blocks is None or self.architecture not in names else gguf.get_tensor_name_map(
                names[self.architecture], int(blocks.contents()))
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ExportError(f"cannot read {path} as GGUF: {type(error).__name__}: {error}") from error
        self.tensors: dict[str, Any] = {tensor.name: tensor for tensor in self._reader.tensors}

    def name_of(self, parameter: str) -> str | None:
        """The tensor of a parameter of transformers' model; ``None`` if this architecture has none."""
        found = None if self._names is None else self._names.get_name(parameter, try_suffixes=SUFFIXES)
        return found if found in self.tensors else None

    def floats(self, name: str) -> Tensor:
        """The numbers of a tensor, float32. Shape: [out, in] of a matrix."""
        tensor = self.tensors[name]
        found = library().quants.dequantize(tensor.data, tensor.tensor_type)
        return torch.from_numpy(found.copy()).reshape(*reversed(tensor.shape.tolist()))

    def dtype(self, name: str) -> torch.dtype | None:
        """The dtype of a tensor of floats; ``None`` of one in blocks."""
        return FLOATS.get(self.tensors[name].tensor_type.name)

    def write(self, path: Path, replaced: Mapping[str, tuple[GgufType, Tensor]]) -> None:
        """Writes the file with the bytes of some tensors replaced. Raises: ExportError if it cannot be written."""
        gguf = library()
        try:
            writer = gguf.GGUFWriter(path, self.architecture, endianess=self._reader.endianess)
            for field in self._reader.fields.values():
                if field.name in (ARCHITECTURE, FILE_TYPE, VERSION) or field.name.startswith("GGUF."):
                    continue
                kind = field.types[0]
                of_items = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(field.name, field.contents(), kind, sub_type=of_items)
            kinds = [kind for kind, _ in replaced.values()]
            most = max(dict.fromkeys(kinds), key=kinds.count)
            writer.add_file_type(int(gguf.LlamaFileType[f"MOSTLY_{most}"]))
            writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
            for name, tensor in self.tensors.items():
                if name in replaced:
                    kind, blocks = replaced[name]
                    writer.add_tensor(name, blocks.numpy(), raw_dtype=gguf.GGMLQuantizationType[kind])
                else:
                    writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
        except (OSError, ValueError) as error:
            raise ExportError(f"cannot write {path}: {error}") from error


def read(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Name → numbers, float32, of the quantized tensors of a GGUF file.

    Raises: ExportError if it cannot be read.
    """
    template = Template(Path(path))
    return {name: template.floats(name) for name, tensor in template.tensors.items()
            if template.dtype(name) is None and not tensor.tensor_type.name.startswith("I")}
