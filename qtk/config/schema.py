"""The configuration a user writes: which tensors are quantized how, on which target. Frozen and checked.

The YAML of ``configs/targets/`` is this schema word for word; ``load_config`` reads it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator
from typing import Annotated, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StrictBool,
    Tag,
    model_validator,
)

from qtk.config.validate import UNION_TAGS
from qtk.core.block_formats import BLOCK_FORMATS
from qtk.core.dtypes import BITS, DTYPES, dtype
from qtk.errors import ConfigError
from qtk.registry import nearest

Bits = Annotated[int, Field(strict=True, ge=BITS.start, le=BITS.stop - 1)]
Real = Annotated[float, Field(strict=True, allow_inf_nan=False)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TensorSetting(_Frozen):
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
        blocks = None if self.dtype is None else BLOCK_FORMATS.get(self.dtype)
        if blocks is not None and self.granularity not in (None, "per_block"):
            raise ValueError(f"dtype {self.dtype} is in blocks, granularity says {self.granularity}; leave one out")
        if self.dtype is not None:
            if self.dtype not in DTYPES and blocks is None:
                raise ValueError(f"unknown dtype {self.dtype!r}; {nearest(self.dtype, [*DTYPES, *BLOCK_FORMATS])}")
            chosen = dtype(self.dtype) if blocks is None else blocks.dtype
            if self.bits not in (None, chosen.bits):
                raise ValueError(f"dtype {self.dtype} has {chosen.bits} bits, bits says {self.bits}; give one of them")
            if self.symmetric and not chosen.signed:
                raise ValueError(f"dtype {self.dtype} is unsigned and symmetric is true; use int{chosen.bits}")
        if self.block_size is not None and self.granularity != "per_block" and blocks is None:
            raise ValueError(f"block_size {self.block_size} needs granularity per_block, got {self.granularity}; "
                             "add granularity: per_block")
        if self.granularity == "per_block" and self.block_size is None and blocks is None:
            raise ValueError("granularity per_block needs a block_size; add one that divides the input channels")
        if self.dynamic is False and self.granularity == "per_token":
            raise ValueError("granularity per_token is dynamic, dynamic says false; leave one out")
        if self.dynamic and self.granularity in ("per_channel", "per_block"):
            raise ValueError(f"dynamic quantization is per_tensor or per_token, granularity says {self.granularity}; "
                             "use one of these")
        fixed = [name for name in ("range", "bounds", "scheme") if getattr(self, name) is not None]
        if self.is_dynamic and fixed:
            raise ValueError(f"dynamic quantization needs no {fixed[0]}; leave {fixed[0]} or dynamic out")
        if self.range is not None and not self.range[0] < self.range[1]:
            raise ValueError(f"range {list(self.range)} must be [low, high] with low < high")
        if self.bounds is not None:
            low, high = self.bounds
            if not (-math.inf if low is None else low) <= 0 <= (math.inf if high is None else high) or low == high:
                raise ValueError(f"bounds {list(self.bounds)} must be [low, high] with low ≤ 0 ≤ high, not the same "
                                 "number twice; null for no bound")
            if self.range is not None:
                raise ValueError(f"range {list(self.range)} says all that bounds {list(self.bounds)} could; "
                                 "leave one out")
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
        given = {name: value for name, value in other if value is not None}
        if other.names_width:
            given = {"bits": None, "dtype": None} | given
        if other.dtype in BLOCK_FORMATS:
            given = {"granularity": None, "block_size": None} | given
        if other.granularity is not None:
            given = {"block_size": None} | given
            if other.granularity != "per_block" and not other.names_width and self.dtype in BLOCK_FORMATS:
                given["dtype"] = BLOCK_FORMATS[self.dtype].dtype.name
        if other.range is not None or other.bounds is not None or other.is_dynamic:
            given = {"range": None, "bounds": None} | given
        if other.is_dynamic:
            given = {"scheme": None} | given | {"dynamic": True}
        elif other.dynamic is False or {"range", "bounds", "scheme"} & given.keys():
            given = {"dynamic": None} | given
            if self.granularity == "per_token":
                given = {"granularity": None} | given
        return self.model_copy(update=given)

    def __repr_args__(self) -> Iterator[tuple[str, object]]:
        return ((name, value) for name, value in self if value is not None)


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


def _with_one_range(setting: TensorSetting | str | None) -> TensorSetting | str | None:
    if isinstance(setting, TensorSetting) and setting.is_dynamic:
        raise ValueError("weights and biases do not change at run time; dynamic and per_token are for activations "
                         "(defaults.activation, and input and output of a rule)")
    return setting


ActivationSetting = Annotated[Setting, AfterValidator(_not_in_blocks)]
WeightSetting = Annotated[Setting, AfterValidator(_with_one_range)]
BiasSetting = Annotated[ActivationSetting, AfterValidator(_with_one_range)]


def _as_list(value: object) -> object:
    return (value,) if isinstance(value, str) else value


Names = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_as_list)]


class Match(_Frozen):
    """Which ops a rule is for: of any kind in ``op`` and at any place in ``path`` (globs over module paths)."""

    op: Names = ()
    path: Names = ()

    @model_validator(mode="after")
    def _not_empty(self) -> Match:
        if not self.op and not self.path:
            raise ValueError("a match needs op, path or both; to match everything write path: '*'")
        return self


class Rule(_Frozen):
    """Settings for the tensors of the ops that match; later rules win.

    Args:
        match: the ops it is for.
        weight: what it says about their weights; likewise ``bias``, ``input``, ``output``.
        optional: that no op matches is no mistake.
    """

    match: Match
    weight: WeightSetting | None = None
    bias: BiasSetting | None = None
    input: ActivationSetting | None = None
    output: ActivationSetting | None = None
    optional: StrictBool = False


class Defaults(_Frozen):
    """What holds where no rule says otherwise. Widths left out are those of the ``QuantSim``."""

    weight: WeightSetting = TensorSetting()
    activation: ActivationSetting = TensorSetting()
    bias: BiasSetting = "float"


class Io(_Frozen):
    """Whether model inputs and outputs are quantized."""

    inputs: Literal["quantized", "float"] = "quantized"
    outputs: Literal["quantized", "float"] = "quantized"


def _spelled_out(value: object) -> object:
    """Patterns whose elements may be lists of alternatives → one pattern for each combination, without repeats."""
    if not isinstance(value, (list, tuple)):
        return value
    spelled: list[object] = []
    for pattern in value:
        if not isinstance(pattern, (list, tuple)):
            spelled.append(pattern)
            continue
        choices = [choice if isinstance(choice, (list, tuple)) else [choice] for choice in pattern]
        spelled.extend(itertools.product(*choices))
    return [pattern for index, pattern in enumerate(spelled) if pattern not in spelled[:index]]


Pattern = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=2)]


class QuantConfig(_Frozen):
    """A whole configuration.

    Args:
        version: of this schema.
        defaults: what holds where no rule matches.
        rules: in order, later ones win.
        supergroups: chains of op kinds that the target runs as one, with one quantizer after the last. In a file an
            element may be a list of alternatives: ``[conv, [relu, relu6]]`` stands for two chains.
        io: model inputs and outputs.

    >>> QuantConfig(version=1, supergroups=[["conv", ["relu", "relu6"]]]).supergroups
    (('conv', 'relu'), ('conv', 'relu6'))
    """

    version: Literal[1]
    defaults: Defaults = Defaults()
    rules: tuple[Rule, ...] = ()
    supergroups: Annotated[tuple[Pattern, ...], BeforeValidator(_spelled_out)] = ()
    io: Io = Io()

    @model_validator(mode="after")
    def _biases_have_a_width(self) -> QuantConfig:
        if _gives_width(self.defaults.bias):
            return self
        settings = [("defaults.bias", self.defaults.bias)]
        settings += [(f"rules[{index}].bias", rule.bias) for index, rule in enumerate(self.rules) if rule.bias]
        for path, setting in settings:
            if setting != "float" and not _gives_width(setting):
                raise ValueError(f"{path}: biases have no width of their own, {setting!r} gives none; "
                                 "add bits or dtype here or to defaults.bias")
        return self


def check_op_names(config: QuantConfig, known: Collection[str]) -> None:
    """Are all ops named in rules and supergroups among ``known``?

    Raises: ConfigError listing every name that is not, with its path and the nearest known ones.
    """
    problems = [
        f"rules[{index}].match.op: unknown op {name!r}; {nearest(name, known)}"
        for index, rule in enumerate(config.rules) for name in rule.match.op if name not in known
    ]
    problems += [
        f"supergroups [{', '.join(pattern)}]: unknown op {name!r}; {nearest(name, known)}"
        for pattern in config.supergroups for name in pattern if name not in known
    ]
    _raise_all(problems)


def check_schemes(config: QuantConfig, check: Callable[[str], object]) -> None:
    """Checks every scheme that a setting names with ``check``, which raises ConfigError for an unknown one.

    Raises: ConfigError as ``check_op_names``.
    """
    defaults = config.defaults
    settings = [(f"defaults.{name}", getattr(defaults, name)) for name in type(defaults).model_fields]
    for index, rule in enumerate(config.rules):
        settings += [(f"rules[{index}].{name}", getattr(rule, name)) for name in ("weight", "bias", "input", "output")]
    problems = []
    for path, setting in settings:
        if isinstance(setting, TensorSetting) and setting.scheme is not None:
            try:
                check(setting.scheme)
            except ConfigError as error:
                problems.append(f"{path}.scheme: {error}")
    _raise_all(problems)


def _raise_all(problems: list[str]) -> None:
    if len(problems) > 1:
        problems = [f"{len(problems)} mistakes in the config:", *problems]
    if problems:
        raise ConfigError("\n  ".join(problems))


def _gives_width(setting: TensorSetting | str | None) -> bool:
    return isinstance(setting, TensorSetting) and setting.names_width
