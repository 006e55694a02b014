"""The runtime that a target is for: the rules of its documents, which an exported file must keep.

    runtime:
      target: tensorrt
      name: TensorRT 11
      formats: [onnx]
      sources:
        quantization: {url: "https://docs.nvidia.com/…", version: "11.3"}
      rules:
        - {name: signed, check: tensors, of: activations, dtype: int8, zero_point: 0, source: quantization,
           says: "activations are int8 with zero point 0", fix: "activation: {dtype: int8, symmetric: true}"}

A rule is data: what it can say is what its class below has fields for. ``runtimes/rule_check.py`` checks them all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import Discriminator, Field, StrictBool, Tag, field_validator, model_validator

from qtk.config.mistakes import RULE_TAGS
from qtk.config.validate import Frozen, Names
from qtk.core.dtypes import DTYPES, INT32
from qtk.registry import nearest

Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(strict=True, ge=1)]
Cost = Annotated[float, Field(gt=0)]
FileFormat = Literal["onnx", "pt2e", "encodings"]


class Source(Frozen):
    """A document that rules come from.

    Args:
        url: where it is.
        version: the version of the runtime, or of the document, that was read.
    """

    url: Annotated[str, Field(pattern=r"^https://")]
    version: Text


class _Rule(Frozen):
    """What every rule has.

    Args:
        name: its name, one of its kind in a target.
        says: the rule in one sentence.
        source: key of the document that says so.
        fix: what to change in a config, or an export, that breaks it.
    """

    name: Text
    says: Text
    source: Text
    fix: Text


class TensorRule(_Rule):
    """How quantized tensors are; a field left out allows everything.

    Args:
        check: ``tensors``.
        of: ``activations``, computed at run time; ``weights`` and ``biases``, stored and read as such; ``constants``,
            other stored tensors.
        op: only tensors read by ops of these kinds, directly or through data movement.
        quantized: ``false``: such tensors have no quantizer at all.
        dtype: their number format is one of these.
        zero_point: 0: every zero point is 0.
        granularity: one of these.
        block_size: a tensor in blocks has one of these block lengths.
        codes: stored codes lie within these two.
        dynamic: whether their ranges are computed at run time.
    """

    check: Literal["tensors"]
    of: Literal["activations", "weights", "biases", "constants"]
    op: Names = ()
    quantized: Literal[False] | None = None
    dtype: Names = ()
    zero_point: Literal[0] | None = None
    granularity: tuple[Literal["per_tensor", "per_channel", "per_token", "per_block"], ...] = ()
    block_size: tuple[Count, ...] = ()
    codes: tuple[int, int] | None = None
    dynamic: StrictBool | None = None

    @property
    def limits(self) -> set[str]:
        """The fields that say how such tensors are."""
        return self.model_fields_set - {"name", "says", "source", "fix", "check", "of", "op"}

    @field_validator("dtype")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in (*DTYPES, INT32.name):
                raise ValueError(f"unknown dtype {name!r}; {nearest(name, DTYPES)}")
        return names

    @model_validator(mode="after")
    def _says_something(self) -> TensorRule:
        if not self.limits:
            raise ValueError("a rule on tensors allows everything; give it a dtype, zero_point, granularity, …")
        return self


class Unchecked(Frozen):
    """What a document asks that no kind of rule expresses.

    Args:
        says: what it asks, in one sentence.
        source: key of the document.
    """

    says: Text
    source: Text


class OpsetRule(_Rule):
    """The operator sets of ONNX that the runtime reads.

    Args:
        check: ``opset``.
        minimum: the lowest.
        maximum: the highest.
    """

    check: Literal["opset"]
    minimum: Count
    maximum: Count

    @model_validator(mode="after")
    def _ordered(self) -> OpsetRule:
        if self.minimum > self.maximum:
            raise ValueError(f"minimum {self.minimum} is above maximum {self.maximum}")
        return self


class OperatorRule(_Rule):
    """Operators of a file that the runtime does not have.

    Args:
        check: ``operators``.
        forbidden: their names in ONNX, or in the exported program.
    """

    check: Literal["operators"]
    forbidden: Annotated[Names, Field(min_length=1)]


class NeighbourRule(_Rule):
    """What is quantized around ops of which an operand is.

    Args:
        check: ``neighbours``.
        op: kinds of ops.
        inputs: ``all``: every value that such an op computes with, biases and float constants aside.
        output: ``quantized``: nothing reads its result but a quantizer, behind one of ``fused`` at most.
        fused: kinds of activations that the runtime computes together with the op.
    """

    check: Literal["neighbours"]
    op: Annotated[Names, Field(min_length=1)]
    inputs: Literal["all"] | None = None
    output: Literal["quantized"] | None = None
    fused: Names = ()

    @model_validator(mode="after")
    def _says_something(self) -> NeighbourRule:
        if self.inputs is None and self.output is None:
            raise ValueError("a rule on neighbours needs inputs or output")
        return self


def _tag(value: object) -> str:
    """The tag of a rule: what it checks. An unknown check gets the tag of a rule on tensors."""
    check = value.get("check") if isinstance(value, Mapping) else getattr(value, "check", None)
    return f"<{check}>" if f"<{check}>" in RULE_TAGS else RULE_TAGS[0]


RuntimeRule = Annotated[
    Annotated[TensorRule, Tag(RULE_TAGS[0])] | Annotated[OpsetRule, Tag(RULE_TAGS[1])]
    | Annotated[OperatorRule, Tag(RULE_TAGS[2])] | Annotated[NeighbourRule, Tag(RULE_TAGS[3])],
    Discriminator(_tag),
]


class Rates(Frozen):
    """How long a kernel takes; the unit is one of all kernels of a runtime, such as picoseconds.

    Args:
        float: for a multiplication of a matrix product, or for an element of the result of another op.
        integer: the same in 8-bit integers; ``None``: the runtime dequantizes, and computes in float.
        dynamic: the same where it quantizes the data at run time, with the time that this takes; ``None``: likewise.
    """

    float: Cost
    integer: Cost | None = None
    dynamic: Cost | None = None


class KernelRow(Rates):
    """The kernels of some ops.

    Args:
        op: kinds or families of ops.
    """

    op: Annotated[Names, Field(min_length=1)]


class Kernels(Frozen):
    """How long the kernels of a runtime take, for estimates of ``qtk.quantize``.

    Args:
        source: key of the document, or measurement, that says so.
        rows: by kinds of ops.
        others: for kinds without a row.
        quantize: for each element that becomes a code.
        dequantize: for each code that becomes a float.
        most_bits: the widest codes that integer kernels take; 16 bits take twice as long as 8.
    """

    source: Text
    rows: tuple[KernelRow, ...] = ()
    others: Rates
    quantize: Cost
    dequantize: Cost
    most_bits: Literal[8, 16] = 8

    def row(self, names: tuple[str, str]) -> Rates:
        """The rates of an op by its kind, else by its family, else the rates of all others."""
        by_name: dict[str, Rates] = {name: row for row in self.rows for name in row.op}
        return next((by_name[name] for name in names if name in by_name), self.others)


class Runtime(Frozen):
    """A runtime and its rules.

    Args:
        target: the name of the target's file; exported files carry it, so that they can be checked by themselves.
        name: the runtime and the versions that the rules hold for.
        formats: the export formats that it takes, or that its converter takes.
        sources: key → document.
        rules: what a file must keep.
        precise: what is left of a site that loses too much: a width that the runtime has fast kernels for, or
            ``float``.
        unchecked: what the documents ask beside, and nothing checks.
        int16_sums: whether some of its CPUs add products of uint8 and int8 in pairs in int16: x86 without VNNI.
        contrib_operators: whether it has ONNX Runtime's own operators, of the domain ``com.microsoft``.
        functions: whether it reads ONNX files with functions of their own.
        dynamic: the shipped target for the same runtime that quantizes activations at run time.
        kernels: how long its kernels take; ``None``: not measured.
    """

    target: Text
    name: Text
    formats: Annotated[tuple[FileFormat, ...], Field(min_length=1)]
    sources: Annotated[Mapping[str, Source], Field(min_length=1)]
    rules: Annotated[tuple[RuntimeRule, ...], Field(min_length=1)]
    precise: Literal[16, "float"] = "float"
    unchecked: tuple[Unchecked, ...] = ()
    int16_sums: bool = False
    contrib_operators: bool = False
    functions: bool = True
    dynamic: Text | None = None
    kernels: Kernels | None = None

    @model_validator(mode="after")
    def _sources_are_there(self) -> Runtime:
        listed = [(f"rules[{index}]", rule.source) for index, rule in enumerate(self.rules)]
        listed += [(f"unchecked[{index}]", each.source) for index, each in enumerate(self.unchecked)]
        listed += [] if self.kernels is None else [("kernels", self.kernels.source)]
        for place, source in listed:
            if source not in self.sources:
                raise ValueError(f"{place}.source: unknown source {source!r}; {nearest(source, self.sources)}")
        names = [rule.name for rule in self.rules]
        for index, rule in enumerate(self.rules):
            if rule.name in names[:index]:
                raise ValueError(f"rules[{index}].name: {rule.name!r} is the name of another rule; give it its own")
        return self

    def op_names(self) -> Iterator[tuple[str, str]]:
        """The kinds of ops that rules name, each with its path."""
        for index, rule in enumerate(self.rules):
            for key in ("op", "fused"):
                yield from ((f"runtime.rules[{index}].{key}", name) for name in getattr(rule, key, ()))
        for index, row in enumerate(() if self.kernels is None else self.kernels.rows):
            yield from ((f"runtime.kernels.rows[{index}].op", name) for name in row.op)
