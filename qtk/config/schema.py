"""The schema of a quantization config.

The YAML files of ``configs/targets/`` follow it; ``load_config`` reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Annotated, Literal

from pydantic import BeforeValidator, Discriminator, Field, StrictBool, Tag, field_validator, model_validator

from qtk.config.mistakes import UNION_TAGS
from qtk.config.runtime import Runtime
from qtk.config.tensor_setting import ActivationSetting, BiasSetting, TensorSetting, WeightSetting
from qtk.config.validate import Frozen, Names
from qtk.errors import ConfigError
from qtk.registry import nearest

MOST_NAMES = 10_000
"""Largest number of op names in all supergroups of a config: each op of a graph is compared with them."""


class Match(Frozen):
    """The ops a rule applies to: all that the conditions given have in common.

    Args:
        op: their kind is one of these; ``python``: in a model that is captured part by part, what the Python between
            the parts makes, and a part reads. Such a part's outputs feed ``python``.
        path: their module path matches one of these globs.
        feeds: their value feeds an op of one of these kinds: it is read by one, directly or through sums, averages,
            bounds, magnitudes, products with parameters, merges and data movement; one of kind topk through softmax and
            sigmoid, too, roots and logarithms through all products and quotients. ``accumulator``: a state that is in
            the sum which becomes its next value; it feeds itself. What such a rule says of ``output`` holds for the
            value as these ops read it; an op with weights, or a matrix product, that reads it too gets it as it would
            be without the rule.
        has_weight: they multiply with a parameter (``true``), or do not (``false``).
        adapter: they belong to an adapter (LoRA: ``s · B (A x)`` beside a product of x with more weights), or do not.
        lm_head: they are the head of a language model, a product with as many outputs as an embedding of the model has
            rows and no other product with weights behind it, or are not.
    """

    op: Names = ()
    path: Names = ()
    feeds: Names = ()
    has_weight: StrictBool | None = None
    adapter: StrictBool | None = None
    lm_head: StrictBool | None = None

    @model_validator(mode="after")
    def _not_empty(self) -> Match:
        if not self.op and not self.path and not self.feeds and all(
                each is None for each in (self.has_weight, self.adapter, self.lm_head)):
            raise ValueError("a match needs op, path, feeds, has_weight, adapter or lm_head; to match everything write "
                             "path: '*'")
        return self


class Rule(Frozen):
    """Settings for the tensors of the ops that match; later rules win.

    What a rule with a path says of ``output`` in bits, or as ``float`` or ``quantized``, holds for the output of the
    supergroup that the op is in. A rule that decides nothing is an error.

    Args:
        match: the ops it applies to.
        weight: setting of their weights.
        bias: setting of their biases.
        input: setting of what they read.
        output: setting of what they compute.
        inside: of recurrent nets and attention: ``float`` quantizes their inputs, weights and outputs alone, so that
            they run as one op; ``quantized``, the default, every value that they compute. Of recurrent nets that is
            ``int16_state``, the sums in front of the gates and the cell state in 16 bits as in the integer LSTMs of
            runtimes; ``int8`` gives every value the width of activations; ``dynamic`` is what ONNX Runtime's
            DynamicQuantizeLSTM computes, and ``float`` where it has no such kernel. A layer of a recurrent net has a
            path of its own, ``lstm.l0`` or ``lstm.l0_reverse``, by which rules set its weights and biases too (or by
            the name of one, ``lstm.weight_ih_l0``); one of which ``compute_encodings`` sees that 8 bits
            do not hold its input stays in float, unless a rule with a path says ``dynamic``.
        optional: it is no error if it decides nothing, or if a width of ``None`` passed to ``QuantSim`` leaves in float
            what it sets.
    """

    match: Match
    weight: WeightSetting | None = None
    bias: BiasSetting | None = None
    input: ActivationSetting | None = None
    output: ActivationSetting | None = None
    inside: Literal["quantized", "float", "int8", "int16_state", "dynamic"] | None = None
    optional: StrictBool = False

    @field_validator("weight", "bias", "input", "output")
    @classmethod
    def _not_empty(cls, value: TensorSetting | str | None) -> TensorSetting | str | None:
        if value == TensorSetting():
            raise ValueError("sets nothing; give it a width, a range or the like, or leave it out")
        return value

    @model_validator(mode="after")
    def _sets_something(self) -> Rule:
        if all(value is None for value in (self.weight, self.bias, self.input, self.output, self.inside)):
            raise ValueError("a rule sets weight, bias, input, output or inside; this one sets none of them")
        return self


class Defaults(Frozen):
    """Settings of tensors that no rule changes. A missing width is the width passed to ``QuantSim``, or 8.

    Args:
        weight: setting of weights.
        activation: setting of activations, model inputs and outputs included.
        bias: setting of biases; ``float`` by default.
    """

    weight: WeightSetting = TensorSetting()
    activation: ActivationSetting = TensorSetting()
    bias: BiasSetting = "float"


class Io(Frozen):
    """Whether model inputs and outputs are quantized.

    Args:
        inputs: ``quantized`` or ``float``, for the inputs of the model.
        outputs: likewise.
    """

    inputs: Literal["quantized", "float"] = "quantized"
    outputs: Literal["quantized", "float"] = "quantized"


class KvCache(Frozen):
    """How the keys and values of every attention are quantized, whatever rules say of activations.

    They are rounded as a cache holds them, keys behind the rotary embedding. Codes are symmetric.

    Args:
        dtype: the number format.
        granularity: ``per_tensor``: a scale for the keys of a layer, and one for its values; ``per_head``: one for each
            of their heads; ``per_token``: dynamic, one for each token and head.
    """

    dtype: Literal["int8", "fp8_e4m3"]
    granularity: Literal["per_tensor", "per_head", "per_token"] = "per_tensor"


def _of_bounded_size(value: object) -> object:
    """Counts the names in patterns before they are validated. Raises: ValueError above ``MOST_NAMES``."""
    names = 0
    for pattern in value if isinstance(value, (list, tuple)) else ():
        for link in pattern if isinstance(pattern, (list, tuple)) else ():
            names += len(link) if isinstance(link, (list, tuple)) else 1
            if names > MOST_NAMES:
                raise ValueError(f"more than {MOST_NAMES} op names; use fewer or shorter chains")
    return value


def _one_alternative_is_a_name(value: object) -> object:
    return value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value


OpName = Annotated[str, Field(min_length=1)]

Alternatives = Annotated[tuple[OpName, ...], Field(min_length=2)]


def _link_tag(value: object) -> str:
    return UNION_TAGS[1] if isinstance(value, (list, tuple)) else UNION_TAGS[0]


Link = Annotated[
    Annotated[OpName, Tag(UNION_TAGS[0])] | Annotated[Alternatives, Tag(UNION_TAGS[1])],
    Discriminator(_link_tag), BeforeValidator(_one_alternative_is_a_name),
]
"""An op of a chain: its name, or alternative names, of which any matches."""

Pattern = Annotated[tuple[Link, ...], Field(min_length=2)]


class QuantConfig(Frozen):
    """A whole configuration.

    Args:
        version: version of this schema.
        defaults: settings of tensors that no rule changes.
        fold_batch_norms: fold batch norms before planning, so that scales belong to the weights a runtime multiplies
            with. ``at_export`` keeps batch norms behind layers live for training, plans and quantizes the layers as
            they will be folded, and folds when the simulation is exported; ``false`` keeps all as operators.
        split_gates: plan SiLU, hardswish and gates of images as a gate and a product, each with a quantizer, for
            runtimes with integer kernels for these two and none for the whole function.
        rules: rules in order; later ones win.
        supergroups: chains of op kinds that the target fuses, with one quantizer after the last. In a file an element
            may be a list of alternatives: ``[conv, [relu, relu6]]``.
        io: whether model inputs and outputs are quantized.
        kv_cache: how keys and values are quantized; left out, as other activations.
        exclude: globs over module paths: all of these modules stays in float, and so does what they read. The same as
            ``modules_to_exclude`` of ``prepare_model``; one that matches no module that runs an op is an error.
        runtime: the runtime that exported files are for, with the rules that ``qtk targets --check`` checks.

    >>> QuantConfig(version=1, supergroups=[["conv", ["relu", "relu6"]]]).supergroups
    (('conv', ('relu', 'relu6')),)
    """

    version: Literal[1]
    defaults: Defaults = Defaults()
    fold_batch_norms: StrictBool | Literal["at_export"] = True
    split_gates: StrictBool = False
    rules: tuple[Rule, ...] = ()
    supergroups: Annotated[tuple[Pattern, ...], BeforeValidator(_of_bounded_size)] = ()
    io: Io = Io()
    kv_cache: KvCache | None = None
    exclude: Names = ()
    runtime: Runtime | None = None

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

    @property
    def target(self) -> str | None:
        """The name that exported files carry; ``None`` without a runtime."""
        return None if self.runtime is None else self.runtime.target

    @property
    def precise(self) -> Literal[16, "float"]:
        """Returns what a site that loses too much is left in: 16 bits without a runtime, else what that says."""
        return 16 if self.runtime is None else self.runtime.precise

    def with_rules_optional(self) -> QuantConfig:
        """The config for a model rewritten since its rules were checked, which may have lost the ops that they set.

        >>> rule = {"match": {"op": "conv"}, "weight": {"bits": 4}}
        >>> QuantConfig(version=1, rules=[rule]).with_rules_optional().rules[0].optional
        True
        """
        rules = tuple(rule.model_copy(update={"optional": True}) for rule in self.rules)
        return self.model_copy(update={"rules": rules})


def check_op_names(config: QuantConfig, known: Collection[str]) -> None:
    """Checks that all ops named in rules, supergroups and the rules of the runtime are among ``known``.

    Raises: ConfigError listing every name that is not, with its path and the nearest known ones.
    """
    problems = [
        f"rules[{index}].match.{key}: unknown op {name!r}; {nearest(name, known)}"
        for index, rule in enumerate(config.rules) for key in ("op", "feeds")
        for name in getattr(rule.match, key) if name not in known
    ]
    problems += [
        f"supergroups[{index}][{position}]: unknown op {name!r}; {nearest(name, known)}"
        for index, pattern in enumerate(config.supergroups) for position, link in enumerate(pattern)
        for name in ((link,) if isinstance(link, str) else link) if name not in known
    ]
    named = () if config.runtime is None else config.runtime.op_names()
    problems += [f"{path}: unknown op {name!r}; {nearest(name, known)}" for path, name in named if name not in known]
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
