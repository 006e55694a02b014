import numpy as np
import onnx_ir as ir
import pytest

from qtk.export.onnx.dequantize_nodes import DequantizeNodes, codes_of, dequantize_of
from qtk.export.onnx.names import ValueNames


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
