import numpy as np
import onnx
import onnx_ir as ir
import pytest

from qtk.export.onnx.default_attributes import drop_default_attributes
from qtk.runtimes.session import create_session

DEFAULTS = {"auto_pad": "NOTSET", "group": 1, "dilations": [1, 1], "strides": [1, 1], "pads": [0, 0, 0, 0]}


def convolution(**attributes):
    node = onnx.helper.make_node("Conv", ["x", "weight"], ["y"], **attributes)
    numbers = np.random.default_rng(0).normal(size=(2, 3, 3, 3)).astype(np.float32)
    weight = onnx.numpy_helper.from_array(numbers, "weight")
    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
            for name, shape in (("x", [1, 3, 8, 8]), ("y", [None] * 4)))
    graph = onnx.helper.make_graph([node], "graph", [x], [y], [weight])
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 19)], ir_version=9)


def without_defaults(model):
    found = ir.from_proto(model)
    drop_default_attributes(found.graph, opset=19)
    return ir.to_proto(found)


def run(model):
    x = np.random.default_rng(1).normal(size=(1, 3, 8, 8)).astype(np.float32)
    return create_session(model.SerializeToString())[0].run(None, {"x": x})[0]


@pytest.mark.parametrize("other", [
    {}, {"dilations": [2, 1]}, {"strides": [2, 2]}, {"pads": [1, 1, 1, 1]}, {"auto_pad": "SAME_UPPER"},
])
def test_only_defaults_are_dropped_and_nothing_changes(other):
    attributes = {**DEFAULTS, **other}
    if "auto_pad" in other:
        del attributes["pads"]
    model = convolution(**attributes)
    small = without_defaults(model)
    assert {attribute.name for attribute in small.graph.node[0].attribute} == set(other)
    np.testing.assert_array_equal(run(small), run(model))
