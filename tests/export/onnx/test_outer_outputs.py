import numpy as np
import onnx_ir as ir
import pytest

from qtk.export.onnx.outer_outputs import return_own_values
from qtk.runtimes.session import create_session


def branch(name, node, output):
    return ir.Graph([], [output], nodes=[node] if node else [], name=name)


@pytest.mark.parametrize("flag", [True, False])
def test_a_branch_returns_a_copy_of_what_it_has_from_outside(flag, tmp_path):
    flag_in, x = (ir.Value(name=name, type=ir.TensorType(kind), shape=ir.Shape(shape))
                  for name, kind, shape in (("flag", ir.DataType.BOOL, []), ("x", ir.DataType.FLOAT, [2])))
    double, negative = ir.node("Add", [x, x]), ir.node("Neg", [x])
    double.outputs[0].name, negative.outputs[0].name = "double", "negative"
    either = ir.node("If", [flag_in], {"then_branch": branch("then", None, double.outputs[0]),
                                       "else_branch": branch("else", negative, negative.outputs[0])})
    y = either.outputs[0]
    y.name, y.type, y.shape = "y", x.type, x.shape
    double.outputs[0].type, double.outputs[0].shape = x.type, x.shape
    graph = ir.Graph([flag_in, x], [y], nodes=[double, either], opset_imports={"": 19}, name="main")
    return_own_values(graph)
    ir.save(ir.Model(graph, ir_version=9), tmp_path / "model.onnx")
    session, _ = create_session(tmp_path / "model.onnx")
    values = np.array([1, 2], np.float32)
    (found,) = session.run(None, {"flag": np.array(flag), "x": values})
    assert np.array_equal(found, 2 * values if flag else -values)
    before = list(graph.all_nodes())
    return_own_values(graph)
    assert list(graph.all_nodes()) == before
