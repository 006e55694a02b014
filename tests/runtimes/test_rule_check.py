"""Each kind of rule against files written out here: kept, and broken in each way it can be."""

from dataclasses import replace

import pytest

from qtk.config.load import load_config
from qtk.export.quantized_file import OUTPUT, QUANTIZE, FileOp, FileTensor, QuantizedFile
from qtk.runtimes.rule_check import is_checked, violations

WEIGHT = FileTensor("conv.weight", "weights", frozenset({"conv2d", "conv"}), "int8", "per_channel",
                    zero_points_are_0=True, codes=(-127, 90))
BLOCKS = replace(WEIGHT, name="fc.weight", readers=frozenset({"linear"}), dtype="int4", granularity="per_block",
                 block_size=32, codes=(-8, 7))


def runtime(**rule):
    rule = {"name": "rule", "says": "it is so", "source": "doc", "fix": "do so", **rule}
    return load_config({"version": 1, "runtime": {
        "target": "mine", "name": "Mine", "formats": ["onnx"], "rules": [rule],
        "sources": {"doc": {"url": "https://example.org/doc", "version": "7"}}}}).runtime


def found(file, **rule):
    return [(each.place, each.found) for each in violations(file, runtime(**rule))]


@pytest.mark.parametrize(("allowed", "change", "said"), [
    ({"dtype": "int8"}, {"dtype": "uint8"}, "uint8"),
    ({"zero_point": 0}, {"zero_points_are_0": False}, "zero points other than 0"),
    ({"granularity": ["per_channel"]}, {"granularity": "per_tensor"}, "per_tensor"),
    ({"codes": [-127, 127]}, {"codes": (-128, 127)}, "codes from -128 to 127"),
    ({"dynamic": False}, {"dynamic": True}, "its range is computed at run time"),
    ({"block_size": [32, 64]}, {"block_size": 16}, "blocks of 16"),
])
def test_a_rule_on_tensors_finds_what_it_does_not_allow_and_nothing_else(allowed, change, said):
    rule = {"check": "tensors", "of": "weights", **allowed}
    assert found(QuantizedFile("onnx", None, 19, (WEIGHT,)), **rule) == []
    broken = replace(WEIGHT, **change)
    assert found(QuantizedFile("onnx", None, 19, (broken,)), **rule) == [("conv.weight", said)]
    assert found(QuantizedFile("onnx", None, 19, (replace(broken, role="constants"),)), **rule) == []
    assert found(QuantizedFile("onnx", None, 19, (broken,)), **rule, op="linear") == []
    assert found(QuantizedFile("onnx", None, 19, (broken,)), **rule, op=["linear", "conv"]) == [("conv.weight", said)]


def test_tensors_that_may_not_be_quantized_are_found():
    file = QuantizedFile("onnx", None, 19, (replace(WEIGHT, role="biases", dtype="int32"),))
    assert found(file, check="tensors", of="biases", quantized=False) == [("conv.weight", "quantized to int32")]


def test_blocks_that_are_allowed_are():
    assert found(QuantizedFile("onnx", None, 21, (BLOCKS,)), check="tensors", of="weights", block_size=[32]) == []


@pytest.mark.parametrize(("opset", "broken"), [(12, True), (13, False), (25, False), (26, True), (None, False)])
def test_the_opset(opset, broken):
    file = QuantizedFile("onnx", None, opset, ())
    assert found(file, check="opset", minimum=13, maximum=25) == [("opset", str(opset))] * broken


def test_operators_that_the_runtime_does_not_have():
    ops = FileOp("a", "QLinearMatMul", ("qlinearmatmul",)), FileOp("b", "MatMul", ("matmul",))
    file = QuantizedFile("onnx", None, 19, (), ops)
    assert found(file, check="operators", forbidden=["QLinearMatMul"]) == [("a", "QLinearMatMul")]


@pytest.mark.parametrize(("operands", "readers", "said"), [
    ((True, True), [QUANTIZE, QUANTIZE], []),
    ((True, True), ["relu"], []),
    ((False, False), [OUTPUT], []),
    ((False, True), [QUANTIZE], ["not all of its inputs are quantized"]),
    ((True, True), [QUANTIZE, OUTPUT], ["its result is read in float"]),
    ((True, True), ["gelu"], ["its result is read in float"]),
    ((True, True), ["relu", QUANTIZE], ["its result is read in float"]),
    ((True, False), ["float relu"], ["not all of its inputs are quantized", "its result is read in float"]),
])
def test_what_is_around_an_op(operands, readers, said):
    others = {
        "relu": FileOp("relu", "aten.relu", ("relu",), (False,), [QUANTIZE]),
        "float relu": FileOp("relu", "aten.relu", ("relu",), (False,), [OUTPUT]),
        "gelu": FileOp("gelu", "aten.gelu", ("gelu",), (False,), [QUANTIZE]),
    }
    op = FileOp("conv", "aten.conv2d", ("conv2d", "conv"), operands, [others.get(each, each) for each in readers])
    rule = {"check": "neighbours", "op": "conv", "inputs": "all", "output": "quantized", "fused": "relu"}
    assert found(QuantizedFile("pt2e", None, None, (), (op,)), **rule) == [("conv", each) for each in said]


def test_a_violation_names_the_place_the_rule_its_source_and_the_way_out():
    file = QuantizedFile("onnx", None, 19, (WEIGHT,))
    (each,) = violations(file, runtime(check="tensors", of="weights", dtype="uint8"))
    assert str(each) == "conv.weight: int8; rule: it is so (https://example.org/doc, 7); do so"


@pytest.mark.parametrize(("rule", "checked"), [
    ({"check": "tensors", "of": "weights", "dtype": "int8"}, {"onnx", "pt2e", "encodings"}),
    ({"check": "tensors", "of": "weights", "dtype": "int8", "op": "conv"}, {"onnx", "pt2e"}),
    ({"check": "tensors", "of": "weights", "codes": [-127, 127]}, {"onnx", "pt2e"}),
    ({"check": "tensors", "of": "weights", "dtype": "int8", "codes": [-127, 127]}, {"onnx", "pt2e", "encodings"}),
    ({"check": "tensors", "of": "biases", "quantized": False, "op": "conv"}, {"onnx", "pt2e"}),
    ({"check": "operators", "forbidden": ["QLinearConv"]}, {"onnx", "pt2e"}),
    ({"check": "neighbours", "op": "conv", "inputs": "all"}, {"onnx", "pt2e"}),
    ({"check": "opset", "minimum": 13, "maximum": 25}, {"onnx"}),
])
def test_a_rule_is_checked_where_the_format_holds_what_it_is_about(rule, checked):
    (only,) = runtime(**rule).rules
    assert {each for each in ("onnx", "pt2e", "encodings") if is_checked(only, each)} == checked
