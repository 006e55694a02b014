"""Steps as JSON and tensors, to store them with a simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import get_type_hints

from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from qtk.errors import EncodingError
from qtk.transforms.absorb_bias import AbsorbBias
from qtk.transforms.channel_scale_step import InsertChannelScale
from qtk.transforms.clamp_step import ScaleClamp
from qtk.transforms.fold_batch_norm_step import FoldBatchNorm
from qtk.transforms.fold_rectified_step import FoldRectifiedBatchNorm
from qtk.transforms.keep_batch_norm_step import FoldKeptBatchNorm, KeepBatchNorm
from qtk.transforms.steps import RemoveParameters, ScaleParameter, Step

KINDS: dict[str, type] = {
    "absorb_bias": AbsorbBias,
    "fold_batch_norm": FoldBatchNorm,
    "fold_rectified_batch_norm": FoldRectifiedBatchNorm,
    "fold_kept_batch_norm": FoldKeptBatchNorm,
    "insert_channel_scale": InsertChannelScale,
    "keep_batch_norm": KeepBatchNorm,
    "remove_parameters": RemoveParameters,
    "scale_clamp": ScaleClamp,
    "scale_parameter": ScaleParameter,
}
"""Name of a step in files → its class."""


def steps_to_json(steps: Sequence[Step]) -> tuple[list[dict[str, object]], dict[str, Tensor]]:
    """One JSON object for each step, and their tensors by ``<index>.<field>``."""
    names = {kind: name for name, kind in KINDS.items()}
    records: list[dict[str, object]] = []
    tensors: dict[str, Tensor] = {}
    for index, step in enumerate(steps):
        record: dict[str, object] = {"step": names[type(step)]}
        for field, hint in get_type_hints(type(step)).items():
            value = getattr(step, field)
            if isinstance(value, Tensor):
                tensors[f"{index}.{field}"] = value.detach().cpu().contiguous()
            else:
                record[field] = TypeAdapter(hint).dump_python(value, mode="json")
        records.append(record)
    return records, tensors


def steps_from_json(records: Sequence[object], tensors: Mapping[str, Tensor]) -> tuple[Step, ...]:
    """The steps that ``steps_to_json`` wrote. Raises: EncodingError naming the first that is malformed."""
    steps = []
    for index, record in enumerate(records):
        if not isinstance(record, dict) or record.get("step") not in KINDS:
            raise EncodingError(f"steps[{index}] is no step of a transform; known: {', '.join(KINDS)}")
        kind = KINDS[str(record["step"])]
        values: dict[str, object] = {}
        try:
            for field, hint in get_type_hints(kind).items():
                stored = tensors.get(f"{index}.{field}")
                values[field] = stored if hint is Tensor else TypeAdapter(hint).validate_python(record[field])
        except (KeyError, ValidationError) as error:
            raise EncodingError(f"steps[{index}] ({record['step']}) is malformed: {error}") from None
        missing = [field for field, value in values.items() if value is None and get_type_hints(kind)[field] is Tensor]
        if missing:
            raise EncodingError(f"steps[{index}] ({record['step']}): tensor {missing[0]} is missing")
        steps.append(kind(**values))
    return tuple(steps)
