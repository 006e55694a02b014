"""The encodings of a model as JSON, in qtk's own format.

    {"format": "qtk.encodings", "version": 1, "producer": "qtk",
     "encodings": {"fc.weight": {"spec": {...}, "scale": [...], "zero_point": null}, ...},
     "dynamic": {"relu:out": {...}, ...}}

``dynamic`` holds the specs of sites with dynamic quantization, if there are any. Scales are written as the
exact decimal value of the float32, so every bit survives; their nesting is the shape.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from qtk.config.files import MOST_LEVELS, check_levels
from qtk.core.encoding import Encoding
from qtk.core.spec import QuantSpec
from qtk.errors import EncodingError, QtkError

FORMAT = "qtk.encodings"
VERSION = 1


def export(
    encodings: Mapping[str, Encoding], path: str | os.PathLike[str], *, dynamic: Mapping[str, QuantSpec] | None = None
) -> None:
    """Writes the encodings, one line per site, in the order of the mapping.

    Args:
        encodings: site name → encoding.
        path: the file to write.
        dynamic: site name → spec, of sites with dynamic quantization.
    """
    header = {"format": FORMAT, "version": VERSION, "producer": "qtk"}
    sections = {"encodings": {site: _record(each) for site, each in encodings.items()}}
    if dynamic:
        sections["dynamic"] = {site: spec.to_json() for site, spec in dynamic.items()}
    text = json.dumps(header)[:-1]
    for name, records in sections.items():
        lines = ",\n".join(f"  {json.dumps(site)}: {json.dumps(record)}" for site, record in records.items())
        text += f', "{name}": {{\n{lines}\n}}'
    text += "}\n"
    Path(path).write_text(text, encoding="utf-8")


def read(path: str | os.PathLike[str]) -> dict[str, Encoding]:
    """The encodings that ``export`` wrote, bit for bit.

    Raises: EncodingError if the file is not an encodings file of this version, or a record in it is malformed.
    """
    return {site: _encoding(site, record) for site, record in _section(path, "encodings").items()}


def read_dynamic(path: str | os.PathLike[str]) -> dict[str, QuantSpec]:
    """The specs of sites with dynamic quantization. Raises: EncodingError as ``read``."""
    return {site: _spec(site, record) for site, record in _section(path, "dynamic").items()}


def _section(path: str | os.PathLike[str], name: str) -> dict[str, object]:
    """The section ``encodings`` or ``dynamic`` of a file; a missing ``dynamic`` is empty."""
    match load_object(path):
        case {"format": str(found), "version": int(version), "encodings": dict(encodings), **rest} if found == FORMAT:
            if version != VERSION:
                raise EncodingError(f"{path}: encodings version {version} is not known; this qtk reads {VERSION}")
        case _:
            raise EncodingError(f"{path} is not a {FORMAT} file; AIMET's files are read by encodings_aimet")
    dynamic = rest.get("dynamic", {})
    if not isinstance(dynamic, dict):
        raise EncodingError(f"{path}: dynamic holds a JSON {type(dynamic).__name__}, expected an object")
    return encodings if name == "encodings" else dynamic


def load_object(path: str | os.PathLike[str]) -> dict[str, object]:
    """The JSON object in a file. Raises: EncodingError if the file cannot be read or holds no JSON object."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        check_levels(data)
    except RecursionError:
        raise EncodingError(f"{path} is not JSON: nested too deeply; at most {MOST_LEVELS} levels") from None
    except OSError as error:
        raise EncodingError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise EncodingError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise EncodingError(f"{path} holds a JSON {type(data).__name__}, expected an object")
    return data


def _record(encoding: Encoding) -> dict[str, object]:
    zero_point = encoding.zero_point
    return {
        "spec": encoding.spec.to_json(),
        "scale": encoding.scale.tolist(),
        "zero_point": None if zero_point is None else zero_point.tolist(),
    }


def _encoding(site: str, record: object) -> Encoding:
    match record:
        case {"spec": dict(spec), "scale": list(scale), "zero_point": list() | None as zero_point, **rest} if not rest:
            pass
        case _:
            raise EncodingError(f"{site}: an encoding needs exactly spec, scale and zero_point, got {record!r:.120}")
    try:
        return Encoding(
            QuantSpec.from_json(spec),
            numbers(scale, torch.float32),
            None if zero_point is None else numbers(zero_point, torch.int32),
        )
    except QtkError as error:
        raise EncodingError(f"{site}: {error}") from error


def _spec(site: str, record: object) -> QuantSpec:
    if not isinstance(record, dict):
        raise EncodingError(f"{site}: a spec is a JSON object, got {record!r:.120}")
    try:
        return QuantSpec.from_json(record)
    except QtkError as error:
        raise EncodingError(f"{site}: {error}") from error


def numbers(values: object, dtype: torch.dtype) -> Tensor:
    """A tensor from nested lists. Raises: EncodingError if they are ragged or hold other values than numbers."""
    try:
        return torch.tensor(values, dtype=dtype)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise EncodingError(f"not a tensor of {dtype}: {error}") from error
