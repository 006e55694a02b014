import numpy as np
import onnx_ir as ir
import pytest
import torch

from qtk.export.onnx.names import ValueNames
from qtk.export.onnx.node_writer import DequantizeNodes, NodeWriter, array_of, codes_of, dequantize_of, value_of

FLOAT = ir.DataType.FLOAT


def writer():
    x = ir.Value(name="x", type=ir.TensorType(FLOAT), shape=ir.Shape([2, 3]))
    last = ir.node("Relu", [x])
    graph = ir.Graph([x], last.outputs, nodes=[last], opset_imports={"": 21})
    return NodeWriter(graph, last, "site", x.shape), x


def test_nodes_stand_in_order_before_the_place_with_names_of_their_own():
    write, x = writer()
    first = write.node("Neg", [x], FLOAT).outputs[0]
    second = write.node("Neg", [first], FLOAT, shape=ir.Shape([1])).outputs[0]
    other = write.node("Neg", [second], ir.DataType.DOUBLE)
    assert [node.op_type for node in write.graph] == ["Neg", "Neg", "Neg", "Relu"]
    values = first, second, other.outputs[0]
    assert [value.producer().name for value in values] == ["site/Neg", "site/Neg.1", "site/Neg.2"]
    assert [value.name for value in values] == ["site/float", "site/float.1", "site/double"]
    assert (list(first.shape), list(second.shape)) == ([2, 3], [1])
    assert other.outputs[0].dtype is ir.DataType.DOUBLE


def test_a_name_that_another_op_has_taken_is_passed_over():
    write, x = writer()
    kinds = ["Neg", "Neg.1", "Neg", "Neg.3", "Neg", "Neg"]
    names = [write.node(kind, [x], FLOAT).name for kind in kinds]
    assert len({*names}) == len(names)
    assert names == ["site/Neg", "site/Neg.1", "site/Neg.2", "site/Neg.3", "site/Neg.4", "site/Neg.5"]


def test_a_cast_to_the_dtype_it_has_is_none():
    write, x = writer()
    assert write.cast(x, FLOAT) is x
    cast = write.cast(x, ir.DataType.FLOAT16)
    assert (cast.dtype, cast.producer().attributes["to"].as_int()) == (ir.DataType.FLOAT16, 10)


def test_an_initializer_is_written_once():
    write, _ = writer()
    first = write.initializer("scale", np.float32([1, 2]))
    assert write.initializer("scale", np.float32([3])) is first
    assert write.graph.initializers["scale"].const_value.numpy().tolist() == [1, 2]
    assert list(first.shape) == [2]


def test_values_and_arrays():
    assert value_of(None, None).type is None
    assert value_of(FLOAT, ir.Shape([4])).dtype is FLOAT
    assert array_of(torch.arange(6.0, requires_grad=True).reshape(2, 3).t()).tolist() == [[0, 3], [1, 4], [2, 5]]


def constant(name, array):
    tensor = ir.tensor(np.asarray(array), name=name)
    return ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape), const_value=tensor)


@pytest.fixture
def graph():
    """codes → DequantizeLinear → Identity → Transpose → output."""
    codes = ir.Value(name="codes", type=ir.TensorType(ir.DataType.UINT8), shape=ir.Shape([2, 3]))
    scale, zero = constant("scale", np.float32(0.5)), constant("zero", np.uint8(7))
    dequantize = ir.node("DequantizeLinear", [codes, scale, zero], name="site")
    dequantize.metadata_props["site"] = "fc:out"
    same = ir.node("Identity", dequantize.outputs)
    moved = ir.node("Transpose", same.outputs)
    for node, name in ((dequantize, "real"), (same, "same"), (moved, "result")):
        node.outputs[0].name, node.outputs[0].dtype = name, ir.DataType.FLOAT
    return ir.Graph([codes], moved.outputs, nodes=[dequantize, same, moved], initializers=[scale, zero])


def test_it_is_found_through_identity_and_only_with_one_scale(graph):
    dequantize, same, moved = graph
    assert dequantize_of(same.outputs[0]) is dequantize
    assert codes_of(dequantize).name == "codes"
    assert dequantize_of(moved.outputs[0]) is None
    assert dequantize_of(graph.inputs[0]) is None
    graph.initializers["scale"].shape = ir.Shape([2])
    assert dequantize_of(same.outputs[0]) is None


def test_a_result_becomes_codes_and_its_readers_and_name_stay(graph):
    dequantize, _, moved = graph
    moved.replace_input_with(0, codes_of(dequantize))
    DequantizeNodes(ValueNames(graph)).behind(moved.outputs[0], dequantize)
    (output,) = graph.outputs
    behind = output.producer()
    assert (output.name, behind.op_type, behind.metadata_props["site"]) == ("result", "DequantizeLinear", "fc:out")
    assert behind.inputs[0] is moved.outputs[0]
    assert [value.name for value in behind.inputs[1:]] == ["scale", "zero"]
    assert (moved.outputs[0].dtype, moved.outputs[0].name) == (ir.DataType.UINT8, "result_1")
