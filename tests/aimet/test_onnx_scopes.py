import onnx_ir as ir

from qtk.aimet.onnx_names import is_movement, sites_of
from qtk.aimet.onnx_scopes import CLASSES, SCOPES, exported_names


def node(op, output, scopes, kind):
    made = ir.node(op, [ir.Value(name="x")])
    made.outputs[0].name = output
    made.metadata_props.update({SCOPES: repr(["", *scopes, output]), CLASSES: repr(["Net", *scopes, f"aten.{kind}"])})
    return made


def test_values_are_named_by_module_and_op():
    """With names and metadata as torch 2.15 wrote them."""
    nodes = [
        node("Conv", "conv2d", ["conv1"], "conv2d.default"), node("Relu", "relu", ["relu"], "relu.default"),
        node("Relu", "relu_1", ["relu"], "relu.default"), node("Relu", "relu_2", ["block", "block.1"], "relu.default"),
        node("MaxPool", "max_pool2d", ["block", "block.2"], "max_pool2d.default"),
        node("Add", "add", [], "add.Tensor"), node("Add", "add_5", [], "add.Tensor"),
        node("Reshape", "view", [], "view.default"),
    ]
    names = exported_names(nodes)
    known = ["conv1:out", "relu:out", "relu@1:out", "block.1:out", "add:out", "add_1:out"]
    assert sites_of(names, known, names) == {
        "conv2d": "conv1:out", "relu": "relu:out", "relu_1": "relu@1:out", "relu_2": "block.1:out", "add": "add:out",
        "add_5": "add_1:out"}
    assert [name for name in names if is_movement(name, names)] == ["max_pool2d", "view"]
    assert not is_movement("view")


def test_a_call_of_several_nodes_is_one_call():
    nodes = [node("Erf", "gelu", [], "gelu.default"), node("Gelu", "gelu_1", [], "gelu.default")]
    nodes[0].metadata_props[SCOPES] = nodes[1].metadata_props[SCOPES]
    nodes[0].outputs[0].name = "val_1"
    names = exported_names(nodes)
    assert (names["val_1"].call, names["gelu_1"].call) == (0, 0)
    assert sites_of(["gelu_1"], ["gelu:out"], names) == {"gelu_1": "gelu:out"}


def test_nodes_without_metadata_have_no_names():
    plain = ir.node("Relu", [ir.Value(name="x")])
    broken = node("Relu", "relu", [], "relu.default")
    broken.metadata_props[SCOPES] = "[1, 2]"
    torn = node("Relu", "relu", [], "relu.default")
    torn.metadata_props[CLASSES] = "['Net'"
    assert exported_names([plain, broken, torn]) == {}
