"""Quantized scalars beside tensors that end in axes of 1, and what reads them."""

import onnx_ir as ir
import pytest

from qtk.export.onnx.names import ValueNames
from qtk.export.onnx.onnxruntime.scalar_ranks import rank_scalars


def ranked(shape, op="Add", more=""):
    text = f"""<ir_version: 10, opset_import: ["" : 21]>
    g (uint8[{shape}] codes, uint8[4] others) => (float y, float z)
    <float scale = {{0.1}}, uint8 zero = {{0}}, uint8 three = {{30}}> {{
        x = DequantizeLinear (codes, scale, zero)
        other = DequantizeLinear (others, scale, zero)
        c = DequantizeLinear (three, scale, zero)
        y = {op} (x, c)
        z = {op} (c, other)
    }}"""
    model = ir.from_onnx_text(text)
    for node, length in zip(model.graph, (shape, "4"), strict=False):
        node.outputs[0].shape = ir.Shape([int(each) for each in length.split(",")])
    rank_scalars(model.graph, ValueNames(model.graph))
    return {node.outputs[0].name: node for node in model.graph}


@pytest.mark.parametrize("op", ["Add", "Mul"])
def test_a_scalar_has_the_rank_of_each_tensor_it_meets(op):
    nodes = ranked("2,8,1,1", op)
    shapes = [
        tuple(nodes[name].inputs[index].producer().inputs[0].shape) for name, index in (("y", 1), ("z", 0))
    ]
    assert shapes == [(1, 1, 1, 1), (1,)]
    for name, index in (("y", 1), ("z", 0)):
        stored = nodes[name].inputs[index].producer().inputs[0].const_value.numpy()
        assert stored.reshape(-1).tolist() == [30]


def test_other_ops_keep_reading_the_scalar():
    nodes = ranked("2,8,1,1", "PRelu")
    assert nodes["y"].inputs[1] is nodes["c"].outputs[0]
