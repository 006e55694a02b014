"""Checks the quantized tensors and ops of a file against the rules of a runtime."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from qtk.config.runtime import NeighbourRule, OperatorRule, OpsetRule, Runtime, RuntimeRule, Source, TensorRule
from qtk.export.quantized_file import QUANTIZE, FileFormat, FileOp, FileTensor, QuantizedFile


@dataclass(frozen=True, slots=True)
class Violation:
    """A place in a file that breaks a rule.

    Args:
        place: the tensor, the op, or what of the file.
        found: what is there.
        rule: the rule.
        source: the document that says so.
    """

    place: str
    found: str
    rule: RuntimeRule
    source: Source

    def __str__(self) -> str:
        return (f"{self.place}: {self.found}; {self.rule.name}: {self.rule.says} ({self.source.url}, "
                f"{self.source.version}); {self.rule.fix}")


def violations(file: QuantizedFile, runtime: Runtime) -> list[Violation]:
    """Returns what in ``file`` breaks rules of ``runtime``, of the rules that ``is_checked`` in its format."""
    return [
        Violation(place, found, rule, runtime.sources[rule.source])
        for rule in runtime.rules if is_checked(rule, file.format) for place, found in _broken(rule, file)
    ]


def is_checked(rule: RuntimeRule, file_format: FileFormat) -> bool:
    """Says whether files of a format hold what a rule is about: encodings have no ops or codes, ONNX an opset.

    >>> from qtk.config.load import load_config
    >>> runtime = load_config("qnn_htp").runtime
    >>> [rule.name for rule in runtime.rules if is_checked(rule, "encodings")]
    ['activations', 'biases']
    """
    match rule:
        case OpsetRule():
            return file_format == "onnx"
        case TensorRule() if not rule.op:
            return rule.limits != unchecked_fields(rule, file_format)
    return file_format != "encodings"


def unchecked_fields(rule: RuntimeRule, file_format: FileFormat) -> set[str]:
    """The fields of a rule on tensors that are about what files of a format do not hold: codes, in encodings.

    >>> from qtk.config.load import load_config
    >>> weights = next(rule for rule in load_config("xnnpack").runtime.rules if rule.name == "weights")
    >>> unchecked_fields(weights, "encodings"), unchecked_fields(weights, "pt2e")
    ({'codes'}, set())
    """
    return rule.limits & {"codes"} if isinstance(rule, TensorRule) and file_format == "encodings" else set()


def _broken(rule: RuntimeRule, file: QuantizedFile) -> Iterator[tuple[str, str]]:
    """Place and finding of each violation of a rule."""
    match rule:
        case TensorRule():
            for tensor in file.tensors:
                if tensor.role == rule.of and (not rule.op or not tensor.readers.isdisjoint(rule.op)):
                    yield from ((tensor.name, found) for found in _tensor_findings(rule, tensor))
        case OpsetRule():
            if file.opset is not None and not rule.minimum <= file.opset <= rule.maximum:
                yield "opset", str(file.opset)
        case OperatorRule():
            yield from ((op.name, op.operator) for op in file.ops if op.operator in rule.forbidden)
        case NeighbourRule():
            for op in file.ops_of(rule.op):
                if any(op.operands):
                    yield from ((op.name, found) for found in _neighbour_findings(rule, op))


def _tensor_findings(rule: TensorRule, tensor: FileTensor) -> Iterator[str]:
    if rule.quantized is False:
        yield f"quantized to {tensor.dtype}"
    if rule.dtype and tensor.dtype not in rule.dtype:
        yield tensor.dtype
    if rule.zero_point == 0 and tensor.zero_points_are_0 is False:
        yield "zero points other than 0"
    if rule.granularity and tensor.granularity not in rule.granularity:
        yield tensor.granularity
    if rule.block_size and tensor.block_size is not None and tensor.block_size not in rule.block_size:
        yield f"blocks of {tensor.block_size}"
    if rule.codes is not None and tensor.codes is not None:
        low, high = tensor.codes
        if low < rule.codes[0] or high > rule.codes[1]:
            yield f"codes from {low} to {high}"
    if rule.dynamic is not None and tensor.dynamic != rule.dynamic:
        yield "its range is computed at run time" if tensor.dynamic else "its range is fixed"


def _neighbour_findings(rule: NeighbourRule, op: FileOp) -> Iterator[str]:
    if rule.inputs == "all" and not all(op.operands):
        yield "not all of its inputs are quantized"
    if rule.output == "quantized" and not _ends_quantized(op, rule):
        yield "its result is read in float"


def _ends_quantized(op: FileOp, rule: NeighbourRule) -> bool:
    """Says whether quantizers alone read the result, or the result of a single activation that is fused with the op."""
    readers = op.readers
    if len(readers) == 1 and isinstance(readers[0], FileOp) and readers[0].is_any_of(rule.fused):
        readers = readers[0].readers
    return all(reader == QUANTIZE for reader in readers)
