"""Resolves the settings of a configuration for one op: the defaults, overlaid by every matching rule in order."""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

from torch import fx

from qtk.config.schema import QuantConfig, Rule
from qtk.config.tensor_setting import TensorSetting
from qtk.core.block_formats import BLOCK_FORMATS
from qtk.core.dtypes import FloatDtype, QDtype, dtype, integer
from qtk.core.granularity import WHOLE, Granularity, PerBlock, PerChannel, PerTensor, PerToken, PerTokenBlock
from qtk.core.spec import QuantSpec, ScaleFormat
from qtk.core.width import FromConfig, Width
from qtk.errors import ConfigError, SpecError
from qtk.graph.flow import Flow
from qtk.graph.sites import COMPOSITE, OWNER, join, label, value_site
from qtk.graph.written_buffers import is_input
from qtk.operators.op_table import ACCUMULATOR, PYTHON
from qtk.planning.decision import Decision
from qtk.planning.recurrent_profiles import DEFAULT, Profile


class Fact(enum.Enum):
    """What passes of the planner need beside ops."""

    SET_INPUTS = "a rule sets inputs of ops"
    BLOCKS = "activations in blocks"
    REQUIRED_RULES = "rules that are not optional"
    INT32_BIASES = "a setting of biases"
    KV_CACHE = "a setting of keys and values"
    STREAMS = "a rule with ``feeds`` that names what the graph has"
    EXCLUSIONS = "excluded modules"
    NESTED = "the graph is inside a composite"


DEFAULT_BITS = 8
"""The width where neither the constructor nor the config's defaults name one."""


@dataclass(frozen=True)
class Matchable:
    """What rules are matched with: an op or graph input.

    Args:
        node: the op or input.
        flow: of its graph.
        feeds: the names of the ops that its value feeds.
        kind: the op kind to match it as; ``None``: its own.
        in_adapter: whether it belongs to an adapter.
        is_lm_head: whether it is the head of a language model.
        part: name of one of its parts, which rules may match by a path of its own; ``""``: all of it.
        parameter: name of one of the parameters of this part, which rules may match as a path too.
        is_accumulator: whether it is a state that is in the sum which becomes its next value.
        in_island: whether the model's own Python calls the graph, and makes its inputs.
    """

    node: fx.Node
    flow: Flow
    feeds: frozenset[str] = frozenset()
    kind: str | None = None
    in_adapter: bool = False
    is_lm_head: bool = False
    part: str = ""
    parameter: str = ""
    is_accumulator: bool = False
    in_island: bool = False

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names by which rules match the op, with the name of the composite around it."""
        row = None if is_input(self.node) else self.flow.row(self.node)
        inputs = ("input", *((PYTHON,) if self.in_island else ()), *((ACCUMULATOR,) if self.is_accumulator else ()))
        own = inputs if is_input(self.node) else () if row is None else row.names
        return tuple(filter(None, (self.kind, *own, label(self.node, COMPOSITE))))

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """The paths by which rules match the op: of its module, its own, of its part, and its parameter's name."""
        place = value_site(self.node).name.partition(":")[0]
        own = re.sub(r"@\d+", "", label(self.node, OWNER) or ""), place
        named = (self.parameter,) if self.parameter else ()
        return (*own, join(re.sub(r"@\d+", "", place), self.part), *named) if self.part else own


@dataclass(frozen=True, slots=True)
class Stream:
    """What rules with ``feeds`` leave open about a value.

    Args:
        feeds: the ops that these rules name.
        elsewhere: the decision for an op with weights, or a matrix product, that reads the value and is none of these.
    """

    feeds: frozenset[str]
    elsewhere: Decision


@dataclass(frozen=True, slots=True)
class OpDecisions:
    """The decisions for weight, bias, inputs and output of one op; ``stream`` if a rule with ``feeds`` set the output.

    Without such a rule ``stream`` is ``None``.
    """

    weight: Decision
    bias: Decision
    input: Decision
    output: Decision
    stream: Stream | None


class Rules:
    """A configuration with the constructor's bit widths, applied to the ops of one graph.

    A width of ``None`` leaves all weights, or all activations, in float, whatever width a rule names.

    Raises: ConfigError if a width contradicts the defaults, or ``None`` a rule that is not optional.
    """

    def __init__(self, config: QuantConfig, *, weight_bits: Width, activation_bits: Width) -> None:
        self.config = config
        defaults = config.defaults
        self.weight = _default("weight", defaults.weight, weight_bits, symmetric=True)
        self.activation = _default("activation", defaults.activation, activation_bits, symmetric=False)
        self.bias = Decision(TensorSetting(), False, "defaults").overlaid(defaults.bias, "defaults")
        _check_left_in_float(config, weight_bits=weight_bits, activation_bits=activation_bits)

    @cached_property
    def facts(self) -> frozenset[object]:
        """Returns what the configuration asks for, of ``Fact``."""
        asks = {
            Fact.SET_INPUTS: any(rule.input is not None for rule in self.config.rules),
            Fact.BLOCKS: any(isinstance(each, TensorSetting) and each.in_blocks for each in (
                self.activation.setting, *(rule.output for rule in self.config.rules))),
            Fact.REQUIRED_RULES: any(not rule.optional for rule in self.config.rules),
            Fact.KV_CACHE: self.config.kv_cache is not None,
            Fact.INT32_BIASES: self.bias.enabled or any(rule.bias is not None for rule in self.config.rules),
        }
        return frozenset(fact for fact, is_asked in asks.items() if is_asked)

    @cached_property
    def fed(self) -> frozenset[str]:
        """The names of the ops in ``feeds`` of rules."""
        return frozenset(name for rule in self.config.rules for name in rule.match.feeds)

    @property
    def quantizes(self) -> bool:
        """Says whether anything is quantized where no rule says otherwise."""
        return self.weight.enabled or self.activation.enabled

    def decisions(
        self, op: Matchable, members: Sequence[Matchable] = (), *, output: Decision | None = None
    ) -> OpDecisions:
        """The settings for an op or graph input.

        Args:
            op: the op or input.
            output: the decision for its output where no rule says otherwise; ``None``: the default.
            members: the other ops of the supergroup, or spelled-out formula, that it ends: its output is theirs, so
                rules with a path that say whether and in how many bits their output is quantized say it of its output.
        """
        weight, bias, incoming, outgoing = self.weight, self.bias, self.activation, output or self.activation
        elsewhere, streams = outgoing, frozenset[str]()
        for index, rule in enumerate(self.config.rules):
            is_own = matches(rule, op)
            if not is_own and not (acts_from_members(rule) and any(matches(rule, member) for member in members)):
                continue
            reason = f"rules[{index}]"
            if is_own:
                weight = weight.overlaid(rule.weight, reason, index)
                bias = bias.overlaid(rule.bias, reason, index)
                incoming = incoming.overlaid(rule.input, reason, index)
            outgoing = outgoing.overlaid(rule.output, reason, index)
            if not rule.match.feeds:
                elsewhere = elsewhere.overlaid(rule.output, reason, index)
            elif rule.output is not None:
                streams |= frozenset(rule.match.feeds)
        stream = Stream(streams, elsewhere) if streams else None
        return OpDecisions(weight, bias, incoming, outgoing, stream)

    def inside(self, composite: Matchable) -> tuple[Profile, str]:
        """Says how the values inside a composite, or a part of it, are quantized, and the rule that says so."""
        profile, reason = DEFAULT, "defaults"
        for index, rule in enumerate(self.config.rules):
            if rule.inside is not None and matches(rule, composite):
                profile, reason = DEFAULT if rule.inside == "quantized" else rule.inside, f"rules[{index}]"
        return profile, reason


def matches(rule: Rule, op: Matchable) -> bool:
    """Says whether an op meets all conditions of a rule."""
    return (
        (not rule.match.feeds or not op.feeds.isdisjoint(rule.match.feeds))
        and (not rule.match.op or any(name in rule.match.op for name in op.names))
        and (not rule.match.path or any(fnmatchcase(path, glob) for path in op.paths for glob in rule.match.path))
        and rule.match.adapter in (None, op.in_adapter)
        and rule.match.lm_head in (None, op.is_lm_head)
        and rule.match.has_weight in (None, bool(not is_input(op.node) and op.flow.weight_ports(op.node)))
    )


def wanted(rule: Rule) -> str:
    """The conditions of a rule, in words."""
    wants = [f"op {', '.join(rule.match.op)}"] if rule.match.op else []
    wants += [f"path {', '.join(rule.match.path)}"] if rule.match.path else []
    wants += [f"feeds {', '.join(rule.match.feeds)}"] if rule.match.feeds else []
    wants += [] if rule.match.has_weight is None else [f"has_weight {str(rule.match.has_weight).lower()}"]
    for name in ("adapter", "lm_head"):
        said = getattr(rule.match, name)
        wants += [] if said is None else [f"{name} {str(said).lower()}"]
    return " and ".join(wants)


def acts_from_members(rule: Rule) -> bool:
    """Says whether a rule on a member of a supergroup acts on the output of the supergroup."""
    says_width = rule.output in ("float", "quantized") or (
        isinstance(rule.output, TensorSetting) and rule.output.names_width
    )
    return bool(rule.match.path) and not rule.match.feeds and says_width


def to_spec(
    setting: TensorSetting, axes: tuple[int, int] | None, rank: int, *, batched: bool = False,
    summed_axis: int | None = None,
) -> QuantSpec:
    """The spec of a tensor of ``rank`` with (output, input) channel axes ``axes`` under a setting.

    A tensor without channel axes is quantized per tensor, or per token, and its scale stored as float32; an activation
    also along the axis that the setting names, and in blocks along ``summed_axis``, counted from the end, over which
    the product that reads it sums. A ``batched`` one holds matrices with output channels of their own: per
    channel it has a scale for every index along all axes but the axis of input channels, per block likewise.

    Raises: SpecError on contradictory settings, or an axis that a tensor of this rank does not have.
    """
    if setting.is_dynamic and setting.granularity == "per_channel":
        raise SpecError("dynamic quantization is per_tensor or per_token, the rules add up to per_channel; say "
                        "dynamic: false with it, or another granularity")
    codes, symmetric, narrow = _codes(setting)
    reduced = bool(setting.reduced_range) and codes.name == "int8"
    granularity = _granularity(setting, axes, rank, batched=batched, summed_axis=summed_axis)
    blocks = BLOCK_FORMATS.get(setting.dtype or "")
    stored = blocks.scale_format if blocks is not None and isinstance(granularity, PerBlock | PerTokenBlock) else None
    dynamic = setting.is_dynamic or (isinstance(granularity, PerTokenBlock) and stored is not ScaleFormat.E4M3)
    if dynamic and setting.dynamic is False:
        raise SpecError(f"activations of {setting.dtype or 'blocks'} find their scales at run time, dynamic says "
                        "false; leave it out, or use nvfp4, of which the scale of the tensor is calibrated")
    return QuantSpec(codes, granularity, symmetric=symmetric, narrow_range=narrow and not reduced,
                     reduced_range=reduced, dynamic=dynamic, scale_format=stored)


def _codes(setting: TensorSetting) -> tuple[QDtype, bool, bool]:
    """The number format, whether it is symmetric, and whether its range is narrow."""
    blocks = BLOCK_FORMATS.get(setting.dtype or "")
    if blocks is not None:
        return blocks.dtype, True, blocks.narrow_range
    symmetric, narrow = bool(setting.symmetric), bool(setting.narrow_range)
    codes = dtype(setting.dtype) if setting.dtype is not None else integer(_bits(setting), signed=symmetric)
    return codes, symmetric or isinstance(codes, FloatDtype), narrow


def _granularity(
    setting: TensorSetting, axes: tuple[int, int] | None, rank: int, *, batched: bool, summed_axis: int | None
) -> Granularity:
    blocks = BLOCK_FORMATS.get(setting.dtype or "")
    length = setting.block_size or (blocks.length if blocks is not None else None)
    if summed_axis is not None and length is not None:
        return PerTokenBlock(length, summed_axis)
    if setting.granularity == "per_token":
        return PerToken()
    if setting.axis is not None:
        return PerChannel(PerChannel(setting.axis).axis_of(rank))
    if axes is None:
        return PerTensor()
    out_axis, in_axis = axes
    if setting.in_blocks:
        assert length is not None
        sizes = [1 if batched else WHOLE] * rank
        sizes[out_axis], sizes[in_axis] = 1, length
        return PerBlock(tuple(sizes))
    if setting.granularity != "per_channel":
        return PerTensor()
    if batched:
        return PerBlock(tuple(WHOLE if axis == in_axis else 1 for axis in range(rank)))
    return PerChannel(out_axis)


def _bits(setting: TensorSetting) -> int:
    assert setting.bits is not None, "an enabled setting has a width"
    return setting.bits


def _width(name: str) -> int:
    return BLOCK_FORMATS[name].dtype.bits if name in BLOCK_FORMATS else dtype(name).bits


def _default(what: str, value: TensorSetting | str | None, bits: Width, *, symmetric: bool) -> Decision:
    """The decision for ``defaults.<what>``, with the width passed to ``QuantSim``.

    Raises: ConfigError if the two name different widths.
    """
    setting = value if isinstance(value, TensorSetting) else TensorSetting()
    config_bits = setting.bits if setting.dtype is None else _width(setting.dtype)
    if isinstance(bits, FromConfig) or bits is None:
        width = DEFAULT_BITS
    else:
        width = integer(bits, signed=symmetric, where=f"{what}_bits").bits
        if config_bits not in (None, width):
            raise ConfigError(f"defaults.{what} of the config says {config_bits} bits, {what}_bits={bits} was given; "
                              f"leave {what}_bits out, pass {config_bits}, or take the width out of the config")
    decided = TensorSetting(symmetric=symmetric, bits=width).overlaid(setting)
    if bits is None:
        return Decision(decided, False, f"{what}_bits=None", is_final=True)
    return Decision(decided, value != "float", "defaults")


def _check_left_in_float(config: QuantConfig, *, weight_bits: Width, activation_bits: Width) -> None:
    """Checks that no rule quantizes what a width of ``None`` leaves in float, unless it is optional.

    Raises: ConfigError.
    """
    left = {"weight": "weight"} if weight_bits is None else {}
    left |= {"input": "activation", "output": "activation"} if activation_bits is None else {}
    for index, rule in enumerate(config.rules):
        for name, what in left.items():
            setting = getattr(rule, name)
            asks = setting == "quantized" or (isinstance(setting, TensorSetting) and setting.names_width)
            if asks and not rule.optional:
                raise ConfigError(
                    f"rules[{index}].{name} ({wanted(rule)}) asks for quantization, {what}_bits=None leaves every "
                    f"{what} in float; mark the rule optional: true to ignore it then, or leave {what}_bits out and "
                    f"say defaults: {{{what}: float}} to quantize these alone"
                )
