"""The encodings of a model as JSON, in qtk's own format.

    {"format": "qtk.encodings", "version": 1, "producer": "qtk",
     "encodings": {"fc.weight": {"spec": {...}, "scale": [...], "zero_point": null}, ...},
     "parameters": {"fc.weight": "weights", ...},
     "dynamic": {"relu:out": {...}, ...},
     "masked": {"add:out": "carries a mask: ...", ...}}

``parameters`` holds the role of each site that is made from parameters alone, ``weights``, ``biases`` or ``constants``,
and of keys and values that ``kv_cache`` quantizes, ``caches``; files of older versions lack it. ``dynamic`` holds the
specs of sites with dynamic quantization, and ``masked`` the sites that calibration left in float for the mask they
carry, each with the reason, if there are any; ``target`` beside ``producer`` names the target, where the config has one
with a runtime. Scales are written as the exact decimal value of the float32, so every bit survives; their nesting is
the shape.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from qtk.config.files import MOST_LEVELS, check_levels
from qtk.core.encoding import Encoding
from qtk.core.spec import QuantSpec
from qtk.errors import EncodingError, QtkError
from qtk.export.quantized_file import TensorRole

FORMAT = "qtk.encodings"
VERSION = 1

PARAMETER_ROLES: tuple[TensorRole, ...] = ("weights", "biases", "constants", "caches")


def export(
    encodings: Mapping[str, Encoding], path: str | os.PathLike[str], *,
    parameters: Mapping[str, TensorRole] | None = None, dynamic: Mapping[str, QuantSpec] | None = None,
    masked: Mapping[str, str] | None = None, target: str | None = None,
) -> None:
    """Writes the encodings, one line per site, in the order of the mapping.

    Args:
        encodings: site name → encoding.
        path: the file to write.
        parameters: site name → role, of the sites that are made from parameters alone; ``None``: the file does not say.
        dynamic: site name → spec, of sites with dynamic quantization.
        masked: site name → reason, of sites that calibration left in float.
        target: the target that they are for.
    """
    header = {"format": FORMAT, "version": VERSION, "producer": "qtk"} | ({} if target is None else {"target": target})
    sections: dict[str, Mapping[str, object]] = {
        "encodings": {site: _record(each) for site, each in encodings.items()}
    }
    if parameters is not None:
        sections["parameters"] = parameters
    if dynamic:
        sections["dynamic"] = {site: spec.to_json() for site, spec in dynamic.items()}
    if masked:
        sections["masked"] = masked
    text = json.dumps(header)[:-1]
    for name, records in sections.items():
        lines = ",\n".join(f"  {json.dumps(site)}: {json.dumps(record)}" for site, record in records.items())
        text += f', "{name}": {{\n{lines}\n}}'
    text += "}\n"
    Path(path).write_text(text, encoding="utf-8")


@dataclass(frozen=True, slots=True, eq=False)
class StoredEncodings:
    """The content of a file.

    Args:
        encodings: site name → encoding.
        dynamic: site name → spec, of sites with dynamic quantization.
        masked: site name → reason, of sites that calibration left in float.
        parameters: site name → role, of the sites that are made from parameters alone; ``None``: it does not say.
    """

    encodings: Mapping[str, Encoding]
    dynamic: Mapping[str, QuantSpec]
    masked: Mapping[str, str]
    parameters: Mapping[str, TensorRole] | None = None


def read(path: str | os.PathLike[str]) -> dict[str, Encoding]:
    """The encodings that ``export`` wrote, bit for bit.

    Raises: EncodingError if the file is not an encodings file of this version, or a record in it is malformed.
    """
    return dict(parse(load_object(path), str(path)).encodings)


def read_target(path: str | os.PathLike[str]) -> str | None:
    """The target that they are for; ``None`` if the file does not say. Raises: EncodingError if it is not JSON."""
    target = load_object(path).get("target")
    return target if isinstance(target, str) else None


def parse(data: Mapping[str, object], source: str) -> StoredEncodings:
    """The content of a file as JSON values; ``source`` names it in errors. Raises: EncodingError as ``read``."""
    match data:
        case {"format": str(found), "version": int(version), "encodings": dict(encodings), **rest} if found == FORMAT:
            if version != VERSION:
                raise EncodingError(f"{source}: encodings version {version} is not known; this qtk reads {VERSION}")
        case _:
            raise EncodingError(f"{source} is not a {FORMAT} file; AIMET's files are read by encodings_aimet")
    dynamic, masked = rest.get("dynamic", {}), rest.get("masked", {})
    for name, section in (("dynamic", dynamic), ("masked", masked)):
        if not isinstance(section, dict):
            raise EncodingError(f"{source}: {name} holds a JSON {type(section).__name__}, expected an object")
    assert isinstance(dynamic, dict)
    assert isinstance(masked, dict)
    if not all(isinstance(reason, str) for reason in masked.values()):
        raise EncodingError(f"{source}: masked holds reasons, expected strings")
    parameters = rest.get("parameters")
    if parameters is not None and not (isinstance(parameters, dict)
                                       and all(role in PARAMETER_ROLES for role in parameters.values())):
        raise EncodingError(f"{source}: parameters holds {parameters!r:.120}, expected an object of roles: "
                            f"{', '.join(PARAMETER_ROLES)}")
    return StoredEncodings(
        {site: _encoding(site, record) for site, record in encodings.items()},
        {site: _spec(site, record) for site, record in dynamic.items()}, masked, parameters,
    )


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
