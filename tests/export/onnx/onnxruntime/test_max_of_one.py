import numpy as np
import onnx_ir as ir
import pytest

from qtk.export.onnx.onnxruntime.max_of_one import read_through_max
from qtk.export.onnx.value_names import ValueNames


def chain(first, second):
    """A graph of two operators of one input each behind codes; what they make, and a reader of it."""
    codes = ir.Value(name="codes", type=ir.TensorType(ir.DataType.UINT8), shape=ir.Shape([4]))
    scale = ir.Value(name="scale", shape=ir.Shape([]), const_value=ir.tensor(np.float32(1)))
    made = ir.node(first, [codes, scale] if first == "DequantizeLinear" else [codes])
    moved = ir.node(second, [made.outputs[0]])
    reader = ir.node("Softmax", [moved.outputs[0]])
    graph = ir.Graph([codes], reader.outputs, nodes=[made, moved, reader], opset_imports={"": 19})
    return ValueNames(graph), moved.outputs[0], reader


@pytest.mark.parametrize(("first", "second", "through"), [
    ("DequantizeLinear", "Transpose", True), ("DequantizeLinear", "Erf", False), ("Cast", "Transpose", False),
])
def test_only_dequantized_values_are_read_through_max(first, second, through):
    names, value, reader = chain(first, second)
    read_through_max(value, [(reader, 0)], names)
    (source,) = reader.inputs
    assert (source is value) is not through
    if through:
        assert (source.producer().op_type, list(source.producer().inputs)) == ("Max", [value])
        assert source.name == f"{value.name}/Max"
