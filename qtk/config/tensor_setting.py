"""What the configuration says about one tensor, and the settings that weights, activations and biases can have."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, StrictBool, Tag, model_validator

from qtk.config.validate import UNION_TAGS
from qtk.core.block_formats import BLOCK_FORMATS
from qtk.core.dtypes import BITS, DTYPES, dtype
from qtk.registry import nearest

Bits = Annotated[int, Field(strict=True, ge=BITS.start, le=BITS.stop - 1)]
Real = Annotated[float, Field(strict=True, allow_inf_nan=False)]


class TensorSetting(BaseModel):
    """What a rule says about one tensor; a field left out is left as earlier rules have it.

    Args:
        bits: width of the codes, 2…16; signed if symmetric, else unsigned.
        dtype: the format by name (``int8``, ``fp8_e4m3``), in place of ``bits``. The name of a block format (``mxfp4``)
            says the granularity too; weights alone can have one, and ``block_size`` another length.
        symmetric: the zero point is 0.
        granularity: which elements share a scale; ``per_token``, each row of the last axis, is ``dynamic``.
        dynamic: activations only: dynamic quantization, the range is that of each tensor at run time.
        block_size: length of a block along the input-channel axis; with ``per_block`` and only there.
        narrow_range: leave the lowest code out.
        range: the real bounds, known beforehand; no data decides them.
        bounds: limits of what data decide, ``null`` for none: ``[0.0, null]`` keeps the range above 0.
        scheme: how the range is found, a name or a name with settings: ``percentile(quantile=0.999)``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    bits: Bits | None = None
    dtype: str | None = None
    symmetric: StrictBool | None = None
    granularity: Literal["per_tensor", "per_channel", "per_token", "per_block"] | None = None
    dynamic: StrictBool | None = None
    block_size: Annotated[int, Field(strict=True, ge=1)] | None = None
    narrow_range: StrictBool | None = None
    range: tuple[Real, Real] | None = None
    bounds: tuple[Real | None, Real | None] | None = None
    scheme: str | None = None

    @model_validator(mode="after")
    def _no_contradiction(self) -> TensorSetting:
        for check in (_check_dtype, _check_block_size, _check_dynamic, _check_limits):
            check(self)
        return self

    @property
    def names_width(self) -> bool:
        """Whether it says how many bits: by ``bits`` or by ``dtype``."""
        return self.bits is not None or self.dtype is not None

    @property
    def is_dynamic(self) -> bool:
        """Whether the range is found at run time, for each tensor or each of its rows."""
        return bool(self.dynamic) or self.granularity == "per_token"

    def overlaid(self, other: TensorSetting) -> TensorSetting:
        """A copy in which every field that ``other`` gives is replaced.

        A width drops an earlier width, however either was written, and a granularity an earlier block size; a format
        in blocks drops an earlier granularity, and a granularity leaves of such a format the numbers; a range and
        bounds drop one another. Dynamic quantization drops what decides a range beforehand, and is dropped by it.
        Whether the fields of the two agree is seen when they become a spec.

        >>> TensorSetting(dtype="int8", symmetric=True).overlaid(TensorSetting(bits=4))
        TensorSetting(bits=4, symmetric=True)
        """
        changes = {name: value for name, value in other if value is not None}
        if other.names_width:
            changes = {"bits": None, "dtype": None} | changes
        if other.dtype in BLOCK_FORMATS:
            changes = {"granularity": None, "block_size": None} | changes
        if other.granularity is not None:
            changes = {"block_size": None} | changes
            if other.granularity != "per_block" and not other.names_width and self.dtype in BLOCK_FORMATS:
                changes["dtype"] = BLOCK_FORMATS[self.dtype].dtype.name
        if other.range is not None or other.bounds is not None or other.is_dynamic:
            changes = {"range": None, "bounds": None} | changes
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
    """A dtype exists and agrees with bits, symmetric and granularity."""
    if setting.dtype is None:
        return
    blocks = BLOCK_FORMATS.get(setting.dtype)
    if blocks is not None and setting.granularity not in (None, "per_block"):
        raise ValueError(f"dtype {setting.dtype} is in blocks, granularity says {setting.granularity}; leave one out")
    if setting.dtype not in DTYPES and blocks is None:
        raise ValueError(f"unknown dtype {setting.dtype!r}; {nearest(setting.dtype, [*DTYPES, *BLOCK_FORMATS])}")
    codes = dtype(setting.dtype) if blocks is None else blocks.dtype
    if setting.bits not in (None, codes.bits):
        raise ValueError(f"dtype {setting.dtype} has {codes.bits} bits, bits says {setting.bits}; give one of them")
    if setting.symmetric and not codes.signed:
        raise ValueError(f"dtype {setting.dtype} is unsigned and symmetric is true; use int{codes.bits}")


def _check_block_size(setting: TensorSetting) -> None:
    """A block size comes with blocks, and blocks with a size; block formats have one."""
    if setting.dtype in BLOCK_FORMATS:
        return
    if setting.block_size is not None and setting.granularity != "per_block":
        raise ValueError(f"block_size {setting.block_size} needs granularity per_block, got {setting.granularity}; "
                         "add granularity: per_block")
    if setting.granularity == "per_block" and setting.block_size is None:
        raise ValueError("granularity per_block needs a block_size; add one that divides the input channels")


def _check_dynamic(setting: TensorSetting) -> None:
    """Dynamic quantization has a granularity that it can have, and nothing that decides ranges beforehand."""
    if setting.dynamic is False and setting.granularity == "per_token":
        raise ValueError("granularity per_token is dynamic, dynamic says false; leave one out")
    if setting.dynamic and setting.granularity in ("per_channel", "per_block"):
        raise ValueError(f"dynamic quantization is per_tensor or per_token, granularity says {setting.granularity}; "
                         "use one of these")
    beforehand = [name for name in ("range", "bounds", "scheme") if getattr(setting, name) is not None]
    if setting.is_dynamic and beforehand:
        raise ValueError(f"dynamic quantization needs no {beforehand[0]}; leave {beforehand[0]} or dynamic out")


def _check_limits(setting: TensorSetting) -> None:
    """A range is one, bounds hold 0 and are two, and there are not both."""
    if setting.range is not None and not setting.range[0] < setting.range[1]:
        raise ValueError(f"range {list(setting.range)} must be [low, high] with low < high")
    if setting.bounds is None:
        return
    low, high = setting.bounds
    if not (-math.inf if low is None else low) <= 0 <= (math.inf if high is None else high) or low == high:
        raise ValueError(f"bounds {list(setting.bounds)} must be [low, high] with low ≤ 0 ≤ high, not the same "
                         "number twice; null for no bound")
    if setting.range is not None:
        raise ValueError(f"range {list(setting.range)} says all that bounds {list(setting.bounds)} could; "
                         "leave one out")


def _setting_tag(value: object) -> str:
    return UNION_TAGS[0] if isinstance(value, str) else UNION_TAGS[1]


Setting: TypeAlias = Annotated[
    Annotated[Literal["float", "quantized"], Tag(UNION_TAGS[0])] | Annotated[TensorSetting, Tag(UNION_TAGS[1])],
    Discriminator(_setting_tag),
]
"""How to quantize a tensor; ``float``: not at all; ``quantized``: undo an earlier ``float``."""


def _not_in_blocks(setting: TensorSetting | str | None) -> TensorSetting | str | None:
    if isinstance(setting, TensorSetting) and setting.dtype in BLOCK_FORMATS:
        raise ValueError(f"{setting.dtype} is for weights; activations in blocks are not built yet; use the number "
                         "format alone, as in {dtype: fp8_e4m3, granularity: per_token}")
    return setting


def _not_dynamic(setting: TensorSetting | str | None) -> TensorSetting | str | None:
    if isinstance(setting, TensorSetting) and setting.is_dynamic:
        raise ValueError("weights and biases do not change at run time; dynamic and per_token are for activations "
                         "(defaults.activation, and input and output of a rule)")
    return setting


ActivationSetting = Annotated[Setting, AfterValidator(_not_in_blocks)]
WeightSetting = Annotated[Setting, AfterValidator(_not_dynamic)]
BiasSetting = Annotated[ActivationSetting, AfterValidator(_not_dynamic)]
