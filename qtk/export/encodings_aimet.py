"""The encodings of a model in the JSON schemas of AIMET: 1.0.0 and 2.0.0.

AIMET 1.0.0 stores ``offset = lowest code - zero_point``: -128 both for symmetric int8 and for uint8 with zero point
128. Only this file uses that convention. AIMET 2.0.0 has the
names and conventions of ONNX QuantizeLinear; a zero point that is 0 everywhere is left out.

Neither schema holds a whole spec (1.0.0: no signedness, axis or shape; both: no narrow or reduced range), so reading
needs the specs of the sites, and for blocks in 1.0.0 the shapes of the tensors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from qtk.core.dtypes import FloatDtype
from qtk.core.encoding import Encoding
from qtk.core.granularity import WHOLE, PerBlock, PerChannel, PerTensor, Shape
from qtk.core.site import Site
from qtk.core.spec import QuantSpec
from qtk.errors import EncodingError, ExportError, QtkError
from qtk.export.encodings_json import load_object, numbers
from qtk.registry import nearest

PRODUCER = {"package": "qtk", "version": "1"}
FLOATS = {"fp8_e4m3": "float8e4m3fn", "fp8_e5m2": "float8e5m2", "fp4_e2m1": "float4e2m1"}
ENC_TYPES = {PerTensor: "PER_TENSOR", PerChannel: "PER_CHANNEL", PerBlock: "PER_BLOCK"}

Record = Mapping[str, object]


def export_1_0_0(
    encodings: Mapping[Site, Encoding], path: str | os.PathLike[str], *, excluded: Sequence[str] = ()
) -> None:
    """Writes the encodings in schema 1.0.0: two lists, parameters and activations.

    Args:
        encodings: site → encoding.
        path: the file.
        excluded: the paths of the modules that are excluded from quantization.

    Raises: ExportError naming the site whose number format or blocks the schema cannot hold.
    """
    records = [(site, _record_1_0_0(site.name, encoding)) for site, encoding in encodings.items()]
    _write(path, {
        "version": "1.0.0",
        "activation_encodings": [record for site, record in records if not _is_parameter(site)],
        "param_encodings": [record for site, record in records if _is_parameter(site)],
        "excluded_layers": list(excluded),
    })


def export_2_0_0(encodings: Mapping[Site, Encoding], path: str | os.PathLike[str]) -> None:
    """Writes the encodings in schema 2.0.0: one list in the vocabulary of ONNX QuantizeLinear.

    Raises: ExportError naming the site whose number format or blocks the schema cannot hold.
    """
    records = [_record_2_0_0(site.name, encoding) for site, encoding in encodings.items()]
    _write(path, {"version": "2.0.0", "encodings": records})


def read(
    path: str | os.PathLike[str],
    specs: Mapping[str, QuantSpec],
    *,
    shapes: Mapping[str, Shape] | None = None,
) -> dict[str, Encoding]:
    """The encodings in a file of either schema, for sites whose specs are known.

    Args:
        path: the file.
        specs: site name → spec; a site without an entry in the file is left out of the result.
        shapes: site name → shape of its tensor; needed for sites in blocks when the schema is 1.0.0.

    Raises: EncodingError if the file is of another schema, names a site not in ``specs``, or a record does not fit
        the spec of its site.
    """
    data = load_object(path)
    match data:
        case {"version": "1.0.0", "activation_encodings": list(activations), "param_encodings": list(parameters)}:
            records, decode = [*activations, *parameters], _scale_and_zero_1_0_0
        case {"version": "2.0.0", "encodings": list(records)}:
            decode = _scale_and_zero_2_0_0
        case _:
            raise EncodingError(f"{path} is not an AIMET encodings file of schema 1.0.0 or 2.0.0 "
                                f"(its version is {data.get('version')!r})")
    encodings = {}
    for record in records:
        site = record.get("name") if isinstance(record, dict) else None
        if not isinstance(site, str):
            raise EncodingError(f"{path}: a record without a name: {record!r:.120}")
        if site not in specs:
            raise EncodingError(f"{path} names the site {site!r}, which the model does not quantize; "
                                f"{nearest(site, specs)}")
        shape = shapes.get(site) if shapes is not None else None
        try:
            encodings[site] = Encoding(specs[site], *decode(record, specs[site], shape))
        except (QtkError, RuntimeError) as error:
            raise EncodingError(f"{path}: {site}: {error}") from error
    return encodings


def _write(path: str | os.PathLike[str], data: Record) -> None:
    Path(path).write_text(json.dumps({"producer": PRODUCER, **data}, indent=1) + "\n", encoding="utf-8")


def _is_parameter(site: Site) -> bool:
    """Whether the site is a parameter: only ops have ports."""
    return not site.port


def _block_axis(site: str, sizes: Shape) -> int:
    """The axis cut into blocks. Raises: ExportError unless there is exactly one."""
    cut = [axis for axis, size in enumerate(sizes) if size not in (1, WHOLE)]
    if len(cut) != 1:
        raise ExportError(f"{site}: AIMET's schemas hold blocks along exactly one axis, the sizes {sizes} cut "
                          f"{len(cut)}; quantize this site per channel, or with blocks like (1, 32)")
    return cut[0]


def _output_dtype(site: str, spec: QuantSpec) -> str:
    """The name of the format in schema 2.0.0."""
    if not isinstance(spec.dtype, FloatDtype):
        return spec.dtype.name
    if spec.dtype.name not in FLOATS:
        raise ExportError(f"{site}: AIMET's schemas hold {', '.join(FLOATS)}, but not {spec.dtype}; "
                          "plan one of these, or take qtk's own encodings.json")
    return FLOATS[spec.dtype.name]


def _record_1_0_0(site: str, encoding: Encoding) -> Record:
    spec = encoding.spec
    if isinstance(spec.dtype, FloatDtype):
        raise ExportError(f"{site}: AIMET's schema 1.0.0 holds no {spec.dtype}; schema 2.0.0 holds "
                          f"{', '.join(FLOATS)}")
    zero = _stored_zero_point(encoding)
    record: dict[str, object] = {
        "name": site,
        "dtype": "INT",
        "enc_type": ENC_TYPES[type(spec.granularity)],
        "bw": spec.dtype.bits,
        "is_sym": spec.symmetric,
        "scale": encoding.scale.flatten().tolist(),
        "offset": (int(spec.dtype.minimum) - zero).flatten().tolist(),
    }
    if isinstance(spec.granularity, PerBlock):
        sizes = spec.granularity.sizes
        record["block_size"] = sizes[_block_axis(site, sizes)]
    return record


def _record_2_0_0(site: str, encoding: Encoding) -> Record:
    spec, scale, zero = encoding.spec, encoding.scale, _stored_zero_point(encoding)
    record: dict[str, object] = {"name": site, "output_dtype": _output_dtype(site, spec)}
    if isinstance(spec.granularity, PerTensor):
        scale, zero = scale.reshape(()), zero.reshape(())
    record["y_scale"] = scale.tolist()
    if bool(zero.any()):
        record["y_zero_point"] = zero.tolist()
    match spec.granularity:
        case PerChannel(axis):
            record["axis"] = axis
        case PerBlock(sizes):
            axis = _block_axis(site, sizes)
            record |= {"axis": axis, "block_size": sizes[axis]}
    return record


def _stored_zero_point(encoding: Encoding) -> Tensor:
    """The zero point with that of a symmetric spec written out."""
    if encoding.zero_point is not None:
        return encoding.zero_point
    return torch.full_like(encoding.scale, encoding.spec.middle_code, dtype=torch.int32)


def _scale_and_zero_1_0_0(record: Record, spec: QuantSpec, shape: Shape | None) -> tuple[Tensor, Tensor | None]:
    expected = {"dtype": "INT", "enc_type": ENC_TYPES[type(spec.granularity)], "bw": spec.dtype.bits,
                "is_sym": spec.symmetric}
    if isinstance(spec.granularity, PerBlock):
        expected["block_size"] = _size_of(spec.granularity)
    _agree(record, expected, spec)
    scale = numbers(record.get("scale"), torch.float32)
    zero = int(spec.dtype.minimum) - numbers(record.get("offset"), torch.int32)
    if isinstance(spec.granularity, PerBlock):
        if shape is None:
            raise EncodingError("schema 1.0.0 does not store the shape of blocks; pass the tensor's in shapes")
        scale = scale.reshape(spec.granularity.qparam_shape(shape))
    return scale, _zero_point(spec, zero.reshape(scale.shape))


def _scale_and_zero_2_0_0(record: Record, spec: QuantSpec, shape: Shape | None) -> tuple[Tensor, Tensor | None]:
    expected: dict[str, object] = {"output_dtype": _output_dtype("", spec)}
    scale = numbers(record.get("y_scale"), torch.float32)
    match spec.granularity:
        case PerTensor():
            expected |= {"axis": None, "block_size": None}
            scale = scale.reshape(1)
        case PerChannel(axis):
            expected |= {"axis": axis, "block_size": None}
        case PerBlock() as blocks:
            expected |= {"axis": _block_axis("", blocks.sizes), "block_size": _size_of(blocks)}
    _agree(record, expected, spec)
    stored = record.get("y_zero_point")
    zero = torch.zeros_like(scale, dtype=torch.int32) if stored is None else numbers(stored, torch.int32)
    return scale, _zero_point(spec, zero.reshape(scale.shape))


def _size_of(blocks: PerBlock) -> int:
    return blocks.sizes[_block_axis("", blocks.sizes)]


def _agree(record: Record, expected: Mapping[str, object], spec: QuantSpec) -> None:
    for key, value in expected.items():
        if record.get(key) != value:
            raise EncodingError(f"{key} is {record.get(key)!r}, but the site is planned as {spec}, "
                                f"which needs {value!r}")


def _zero_point(spec: QuantSpec, zero: Tensor) -> Tensor | None:
    if not spec.symmetric:
        return zero
    if bool((zero != spec.middle_code).any()):
        raise EncodingError(f"the zero point is not {spec.middle_code}, but the site is planned as {spec}")
    return None
