"""The encodings of a model in the JSON schemas of AIMET: 0.6.1, 1.0.0, 2.0.0 and 2.1.0.

AIMET 0.6.1 and 1.0.0 store ``offset = lowest code - zero_point``: -128 both for symmetric int8 and for uint8 with zero
point 128. Only ``qtk/export/aimet`` uses that convention. AIMET 2.0.0 and 2.1.0 have the names and
conventions of ONNX QuantizeLinear.

No schema holds a whole spec (0.6.1 and 1.0.0: no signedness, axis or shape; all: no narrow or reduced range), so
reading needs the specs of the tensors, and for blocks in 1.0.0 their shapes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from torch import Tensor

from qtk.aimet import schema_0_6_1, schema_1_0_0, schema_2_0_0, schema_2_1_0
from qtk.aimet.fields import NamedEncoding
from qtk.core.encoding import Encoding
from qtk.core.granularity import Shape
from qtk.core.spec import QuantSpec
from qtk.errors import EncodingError, ExportError, QtkError
from qtk.export.encodings_json import load_object
from qtk.registry import nearest

PRODUCER = {"package": "qtk", "version": "1"}

Decode: TypeAlias = Callable[[object, QuantSpec, Shape | None], tuple[Tensor, Tensor | None]]


def export_0_6_1(
    tensors: Iterable[NamedEncoding], path: str | os.PathLike[str], *, excluded: Sequence[str] = ()
) -> None:
    """Writes the encodings in schema 0.6.1: name → list of records, parameters and activations apart.

    Args:
        tensors: the tensors with their encodings, each name once.
        path: the file.
        excluded: the paths of the modules that are excluded from quantization.

    Raises: ExportError naming the tensor whose number format or blocks the schema cannot hold.
    """
    records = [(each, _of(each, schema_0_6_1.records)) for each in tensors]
    _write(path, {
        "version": "0.6.1",
        "activation_encodings": {each.name: record for each, record in records if not each.is_parameter},
        "param_encodings": {each.name: record for each, record in records if each.is_parameter},
        "excluded_layers": list(excluded),
    })


def export_1_0_0(
    tensors: Iterable[NamedEncoding], path: str | os.PathLike[str], *, excluded: Sequence[str] = ()
) -> None:
    """Writes the encodings in schema 1.0.0: two lists, parameters and activations. Else as ``export_0_6_1``."""
    records = [(each, _of(each, schema_1_0_0.record)) for each in tensors]
    _write(path, {
        "version": "1.0.0",
        "activation_encodings": [record for each, record in records if not each.is_parameter],
        "param_encodings": [record for each, record in records if each.is_parameter],
        "excluded_layers": list(excluded),
    })


def export_2_0_0(
    tensors: Iterable[NamedEncoding], path: str | os.PathLike[str], *, excluded: Sequence[str] = ()
) -> None:
    """Writes the encodings in schema 2.0.0: one list, without ``excluded``, for which it has no place.

    Raises: ExportError as ``export_0_6_1``.
    """
    _write(path, {"version": "2.0.0", "encodings": [_of(each, schema_2_0_0.record) for each in tensors]})


def export_2_1_0(
    tensors: Iterable[NamedEncoding], path: str | os.PathLike[str], *, excluded: Sequence[str] = ()
) -> None:
    """Writes the encodings in schema 2.1.0. Else as ``export_2_0_0``."""
    _write(path, {"version": "2.1.0", "encodings": [_of(each, schema_2_1_0.record) for each in tensors]})


WRITERS = {"0.6.1": export_0_6_1, "1.0.0": export_1_0_0, "2.0.0": export_2_0_0, "2.1.0": export_2_1_0}


def read(
    path: str | os.PathLike[str],
    specs: Mapping[str, QuantSpec],
    *,
    shapes: Mapping[str, Shape] | None = None,
) -> dict[str, Encoding]:
    """The encodings in a file of any schema, for tensors whose specs are known.

    Args:
        path: the file.
        specs: name → spec; a name without an entry in the file is left out of the result.
        shapes: name → shape of the tensor; needed for blocks when the schema is 1.0.0.

    Raises: EncodingError if the file is of another schema, names a tensor not in ``specs``, or a record does not fit
        its spec.
    """
    encodings = {}
    for name, record in records(load_object(path), str(path)).items():
        if name not in specs:
            raise EncodingError(f"{path} names {name!r}, which the model does not quantize; {nearest(name, specs)}")
        try:
            encodings[name] = record.encoding(specs[name], (shapes or {}).get(name))
        except EncodingError as error:
            raise EncodingError(f"{path}: {name}: {error}") from error
    return encodings


class StoredRecord:
    """What a file says about one tensor."""

    def __init__(self, decode: Decode, content: object) -> None:
        self._decode, self.content = decode, content

    def encoding(self, spec: QuantSpec, shape: Shape | None) -> Encoding:
        """The encoding of a tensor of this spec and shape. Raises: EncodingError if the record does not fit it."""
        try:
            return Encoding(spec, *self._decode(self.content, spec, shape))
        except (QtkError, RuntimeError) as error:
            raise EncodingError(str(error)) from error


def records(data: Mapping[str, object], source: str) -> dict[str, StoredRecord]:
    """Name of a tensor → its record, for every entry of the content of a file.

    Raises: EncodingError if the content is of no known schema, an entry has no name, or two entries have one name.
    """
    match data:
        case {"activation_encodings": dict(activations), "param_encodings": dict(parameters)}:
            activations = _by_value(activations)
            twice = next((name for name in parameters if name in activations), None)
            if twice is not None:
                raise EncodingError(f"{source} names {twice!r} twice; remove one entry")
            return {name: StoredRecord(schema_0_6_1.decode, each) for name, each in (activations | parameters).items()}
        case {"version": "1.0.0", "activation_encodings": list(activations), "param_encodings": list(parameters)}:
            listed, decode = [*activations, *parameters], schema_1_0_0.decode
        case {"version": "2.0.0", "encodings": list(listed)}:
            decode = schema_2_0_0.decode
        case {"version": "2.1.0", "encodings": list(listed)}:
            decode = schema_2_1_0.decode
        case _:
            raise EncodingError(f"{source} is not an AIMET encodings file of schema {', '.join(WRITERS)} "
                                f"(its version is {data.get('version')!r})")
    named: dict[str, StoredRecord] = {}
    for each in listed:
        name = each.get("name") if isinstance(each, dict) else None
        if not isinstance(name, str):
            raise EncodingError(f"{source}: a record without a name: {each!r:.120}")
        if name in named:
            raise EncodingError(f"{source} names {name!r} twice; remove one entry")
        named[name] = StoredRecord(decode, each)  # type: ignore[arg-type]
    return named


def _by_value(activations: Mapping[str, object]) -> dict[str, object]:
    """Entries by the name of a value; a module in the file that AIMET itself reads gives ``fc:in[0]``, ``fc:out``."""
    entries: dict[str, object] = {}
    for name, entry in activations.items():
        if not isinstance(entry, dict):
            entries[name] = entry
            continue
        for key in ("input", "output"):
            if not isinstance(entry.get(key) or {}, dict):
                raise EncodingError(f"{name}: {key} holds a JSON {type(entry[key]).__name__}, expected an object")
        for index, record in (entry.get("input") or {}).items():
            entries[f"{name}:in[{index}]"] = [record]
        for index, record in (entry.get("output") or {}).items():
            entries[f"{name}:out[{index}]" if index != "0" else f"{name}:out"] = [record]
    return entries


def _of(tensor: NamedEncoding, write: Callable[[NamedEncoding], object]) -> object:
    try:
        return write(tensor)
    except ExportError as error:
        raise ExportError(f"{tensor.name}: {error}") from error


def _write(path: str | os.PathLike[str], data: Mapping[str, object]) -> None:
    Path(path).write_text(json.dumps({"producer": PRODUCER, **data}, indent=1) + "\n", encoding="utf-8")
