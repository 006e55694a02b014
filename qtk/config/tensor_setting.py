"""The setting of one tensor in a config, and which settings weights, activations and biases can have."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, StrictBool, Tag, model_validator

from qtk.config.mistakes import UNION_TAGS
from qtk.core.block_formats import BLOCK_FORMATS
from qtk.core.dtypes import BITS, DTYPES, INT32, dtype
from qtk.core.spec import ScaleFormat
from qtk.registry import nearest

Bits = Annotated[int, Field(strict=True, ge=BITS.start, le=BITS.stop - 1)]
Real = Annotated[float, Field(strict=True, allow_inf_nan=False)]


class TensorSetting(BaseModel):
    """The setting of one tensor in a rule; a missing field keeps its value from earlier rules.

    Args:
        bits: width of the codes, 2…16; signed if symmetric, else unsigned.
        dtype: the format by name (``int8``, ``fp8_e4m3``), instead of ``bits``. A block format (``mxfp4``) also sets
            the granularity, and ``block_size`` can change its block length. ``int32`` is for biases only: they have
            the scale of the products that they are added to, see ``plan_biases``.
        symmetric: the zero point is 0; of an unsigned ``dtype`` the middle code, 128 of uint8.
        granularity: which elements share a scale; ``per_token``, each row of the last axis, is ``dynamic``.
        axis: of an activation ``per_channel``, and only there: the axis that has a scale for each index, of a fixed
            length; 1 of a cache [batch, heads, length, width] is one scale for each head.
        dynamic: dynamic quantization: the range is computed from each tensor at run time; for activations only. In
            blocks it always is, but for the scale of the tensor of ``nvfp4``, which is calibrated unless this is true.
        block_size: length of a block along the input-channel axis, of an activation the axis that the product which
            reads it sums over; with ``per_block`` and only there.
        remainder: what becomes of a tensor whose input channels ``block_size`` does not divide: ``float``; left out, it
            is an error for a weight, and the last block of an activation is shorter.
        narrow_range: exclude the lowest code.
        reduced_range: of int8 codes, use -64…64, whose products with uint8 are exact on x86 without VNNI; codes of
            other widths keep their range.
        range: fixed real range; not calibrated.
        min_fill: the share of ``range`` that data must fill for it to be taken; where they fill less, the range is
            calibrated within it. Left out, it is taken whatever the data.
        bounds: limits of the calibrated range, ``null`` for none: ``[0.0, null]`` keeps it at or above 0.
        scheme: how the range is found, a name or a name with settings: ``percentile(quantile=0.999)``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    bits: Bits | None = None
    dtype: str | None = None
    symmetric: StrictBool | None = None
    granularity: Literal["per_tensor", "per_channel", "per_token", "per_block"] | None = None
    axis: Annotated[int, Field(strict=True)] | None = None
    dynamic: StrictBool | None = None
    block_size: Annotated[int, Field(strict=True, ge=1)] | None = None
    remainder: Literal["float"] | None = None
    narrow_range: StrictBool | None = None
    reduced_range: StrictBool | None = None
    range: tuple[Real, Real] | None = None
    min_fill: Annotated[float, Field(gt=0, le=1)] | None = None
    bounds: tuple[Real | None, Real | None] | None = None
    scheme: str | None = None

    @model_validator(mode="after")
    def _no_contradiction(self) -> TensorSetting:
        for check in (_check_dtype, _check_axis, _check_block_size, _check_dynamic, _check_limits):
            check(self)
        return self

    @property
    def names_width(self) -> bool:
        """Says whether ``bits`` or ``dtype`` is set."""
        return self.bits is not None or self.dtype is not None

    @property
    def is_dynamic(self) -> bool:
        """Says whether the range is computed at run time, per tensor or per token."""
        return bool(self.dynamic) or self.granularity == "per_token"

    @property
    def in_blocks(self) -> bool:
        """Says whether blocks of elements share a scale."""
        return self.dtype in BLOCK_FORMATS or self.granularity == "per_block"

    def overlaid(self, other: TensorSetting) -> TensorSetting:
        """A copy with every field that ``other`` sets replaced, and the earlier fields that contradict it dropped.

        ``bits`` and ``dtype`` replace one another, and so do ``range`` and ``bounds``; a granularity drops an earlier
        axis and block size. A block format drops an earlier granularity; a later granularity keeps only the number
        format of a block format. ``dynamic`` drops range, bounds and scheme, and each of these drops ``dynamic``. Other
        contradictions are reported when the setting becomes a spec.

        >>> TensorSetting(dtype="int8", symmetric=True).overlaid(TensorSetting(bits=4))
        TensorSetting(bits=4, symmetric=True)
        """
        changes = {name: value for name, value in other if value is not None}
        if other.names_width:
            changes = {"bits": None, "dtype": None} | changes
        if other.dtype in BLOCK_FORMATS:
            changes = {"granularity": None, "axis": None, "block_size": None} | changes
        if other.granularity is not None:
            changes = {"axis": None, "block_size": None, "remainder": None} | changes
            if other.granularity != "per_block" and not other.names_width and self.dtype in BLOCK_FORMATS:
                changes["dtype"] = BLOCK_FORMATS[self.dtype].dtype.name
        if other.range is not None or other.bounds is not None or other.is_dynamic:
            changes = {"range": None, "min_fill": None, "bounds": None} | changes
        if other.is_dynamic:
            changes = {"scheme": None} | changes | {"dynamic": True}
        elif other.dynamic is False or {"range", "bounds", "scheme"} & changes.keys():
            changes = {"dynamic": None} | changes
            if self.granularity == "per_token":
                changes = {"granularity": None} | changes
        return self.model_copy(update=changes)

    def __repr_args__(self) -> Iterator[tuple[str, object]]:
        return ((name, value) for name, value in self if value is not None)


def _check_dtype(setting: TensorSetting) -> None:
    """Checks that dtype exists and agrees with bits, reduced_range and granularity. Raises: ValueError."""
    if setting.reduced_range and setting.bits not in (None, 8):
        raise ValueError(f"reduced_range needs bits: 8, got bits: {setting.bits}; leave one out")
    if setting.dtype is None:
        return
    blocks = BLOCK_FORMATS.get(setting.dtype)
    if blocks is not None and setting.granularity not in (None, "per_block"):
        raise ValueError(f"dtype {setting.dtype} is in blocks, granularity says {setting.granularity}; leave one out")
    if setting.dtype not in (*DTYPES, INT32.name) and blocks is None:
        raise ValueError(f"unknown dtype {setting.dtype!r}; {nearest(setting.dtype, [*DTYPES, *BLOCK_FORMATS])}")
    codes = dtype(setting.dtype) if blocks is None else blocks.dtype
    if setting.bits not in (None, codes.bits):
        raise ValueError(f"dtype {setting.dtype} has {codes.bits} bits, bits says {setting.bits}; give one of them")
    if setting.reduced_range and codes.name != "int8":
        raise ValueError(f"reduced_range needs dtype: int8, got dtype: {setting.dtype}; leave one out")


def _check_axis(setting: TensorSetting) -> None:
    """Checks that an axis stands beside per_channel. Raises: ValueError."""
    if setting.axis is not None and setting.granularity != "per_channel":
        raise ValueError(f"axis {setting.axis} needs granularity per_channel, got {setting.granularity}; "
                         "add granularity: per_channel, or leave axis out")


def _check_block_size(setting: TensorSetting) -> None:
    """Checks that block_size is set if and only if the granularity is per_block. Raises: ValueError."""
    if setting.dtype in BLOCK_FORMATS:
        return
    if setting.remainder is not None and setting.granularity != "per_block":
        raise ValueError(f"remainder {setting.remainder} needs granularity per_block, got {setting.granularity}; "
                         "add granularity: per_block, or leave remainder out")
    if setting.block_size is not None and setting.granularity != "per_block":
        raise ValueError(f"block_size {setting.block_size} needs granularity per_block, got {setting.granularity}; "
                         "add granularity: per_block")
    if setting.granularity == "per_block" and setting.block_size is None:
        raise ValueError("granularity per_block needs a block_size; add one that divides the input channels")


def _check_dynamic(setting: TensorSetting) -> None:
    """Checks that dynamic has a suitable granularity, and no range, bounds or scheme. Raises: ValueError."""
    if setting.dynamic is False and setting.granularity == "per_token":
        raise ValueError("granularity per_token is dynamic, dynamic says false; leave one out")
    if setting.dynamic and setting.granularity == "per_channel":
        raise ValueError("dynamic quantization is per_tensor, per_token or per_block, granularity says per_channel; "
                         "use one of these")
    beforehand = [name for name in ("range", "bounds", "scheme") if getattr(setting, name) is not None]
    if setting.is_dynamic and beforehand:
        raise ValueError(f"dynamic quantization needs no {beforehand[0]}; leave {beforehand[0]} or dynamic out")


def _check_limits(setting: TensorSetting) -> None:
    """Checks that range is ascending, bounds contain 0, and not both are set. Raises: ValueError."""
    if setting.range is not None and not setting.range[0] < setting.range[1]:
        raise ValueError(f"range {list(setting.range)} must be [low, high] with low < high")
    if setting.min_fill is not None and setting.range is None:
        raise ValueError(f"min_fill {setting.min_fill:g} is a share of a range; add range: [low, high]")
    if setting.bounds is None:
        return
    low, high = setting.bounds
    if not (-math.inf if low is None else low) <= 0 <= (math.inf if high is None else high) or low == high:
        raise ValueError(f"bounds {list(setting.bounds)} must be [low, high] with low ≤ 0 ≤ high, not the same "
                         "number twice; null for no bound")
    if setting.range is not None:
        raise ValueError(f"range {list(setting.range)} already fixes the limits that bounds {list(setting.bounds)} "
                         "would set; leave one out")


def _setting_tag(value: object) -> str:
    return UNION_TAGS[0] if isinstance(value, str) else UNION_TAGS[1]


Setting: TypeAlias = Annotated[
    Annotated[Literal["float", "quantized"], Tag(UNION_TAGS[0])] | Annotated[TensorSetting, Tag(UNION_TAGS[1])],
    Discriminator(_setting_tag),
]
"""A tensor's setting; ``float``: not quantized; ``quantized``: undoes an earlier ``float``."""


def _of_an_axis(setting: TensorSetting | str | None) -> TensorSetting | str | None:
    if isinstance(setting, TensorSetting) and setting.granularity == "per_channel" and setting.axis is None:
        raise ValueError("no op says which axis of an activation its channels are; add axis, as in {granularity: "
                         "per_channel, axis: 1}")
    return setting


def _without_axis(setting: TensorSetting | str | None) -> TensorSetting | str | None:
    if isinstance(setting, TensorSetting) and setting.axis is not None:
        raise ValueError(f"axis {setting.axis}: the op decides which axis of a weight has the channels; leave axis out")
    return setting


def _not_in_blocks(setting: TensorSetting | str | None) -> TensorSetting | str | None:
    if isinstance(setting, TensorSetting) and setting.in_blocks:
        raise ValueError(f"{setting.dtype or 'per_block'} is for what products multiply; of a bias use the number "
                         "format alone, as in {dtype: int8}")
    return setting


def _without_lpbq(setting: TensorSetting | str | None) -> TensorSetting | str | None:
    blocks = BLOCK_FORMATS.get(setting.dtype or "") if isinstance(setting, TensorSetting) else None
    if blocks is not None and blocks.scale_format is ScaleFormat.INT4:
        raise ValueError(f"{blocks.name} is for weights: its scales share one of an output channel; use nvfp4, or "
                         "{dtype: int4, granularity: per_block, block_size: 64}")
    return setting


def _not_dynamic(setting: TensorSetting | str | None) -> TensorSetting | str | None:
    if isinstance(setting, TensorSetting) and setting.is_dynamic:
        raise ValueError("weights and biases do not change at run time; dynamic and per_token are for activations "
                         "(defaults.activation, and input and output of a rule)")
    return setting


def _not_int32(setting: TensorSetting | str | None) -> TensorSetting | str | None:
    if isinstance(setting, TensorSetting) and setting.dtype == INT32.name:
        raise ValueError(f"int32 is for biases; use a format of {BITS.start} to {BITS.stop - 1} bits")
    return setting


ActivationSetting = Annotated[
    Setting, AfterValidator(_without_lpbq), AfterValidator(_of_an_axis), AfterValidator(_not_int32)
]
WeightSetting = Annotated[
    Setting, AfterValidator(_not_dynamic), AfterValidator(_without_axis), AfterValidator(_not_int32)
]
BiasSetting = Annotated[
    Setting, AfterValidator(_not_in_blocks), AfterValidator(_without_axis), AfterValidator(_not_dynamic)
]
