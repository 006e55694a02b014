"""Every name in an ONNX graph belongs to one value, in subgraphs too."""

import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

from qtk.export.free_axes import EqualAxes
from qtk.export.onnx.names import ValueNames, fix_lengths, name_inputs_and_outputs, name_lengths, op_of
from qtk.export.onnx.qdq import export
from tests.export.onnx.simulated import simulate


def graph_of(nodes=None, shape=("s77", 4)):
    nodes = nodes or [helper.make_node("Relu", ["a"], ["b"]), helper.make_node("Neg", ["b"], ["c"])]
    graph = helper.make_graph(
        nodes, "graph", [helper.make_tensor_value_info("a", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("c", TensorProto.FLOAT, shape)],
    )
    return ir.from_proto(helper.make_model(graph)).graph


def value(graph, name):
    return next(output for node in graph.all_nodes() for output in node.outputs if output.name == name)


def test_whoever_had_a_name_gets_another():
    graph = graph_of()
    names = ValueNames(graph)
    names.give(value(graph, "b"), "a")
    assert [graph.inputs[0].name, *(node.outputs[0].name for node in graph)] == ["a_1", "a", "c"]
    names.give(graph.inputs[0], "b")  # which is free now
    assert graph.inputs[0].name == "b"
    assert names.free("c") == "c_1"
    assert names.free("d") == "d"


def test_names_inside_subgraphs_are_taken():
    branches = {
        f"{name}_branch": helper.make_graph(
            [helper.make_node(op, ["a"], [f"inside_{name}"])], name, [],
            [helper.make_tensor_value_info(f"inside_{name}", TensorProto.FLOAT, ["s77", 4])],
        )
        for name, op in (("then", "Relu"), ("else", "Neg"))
    }
    graph = graph_of([
        helper.make_node("Constant", [], ["yes"], value=helper.make_tensor("", TensorProto.BOOL, (), [True])),
        helper.make_node("If", ["yes"], ["c"], **branches),
    ])
    names = ValueNames(graph)
    assert names.free("inside_then") == "inside_then_1"
    names.give(graph.inputs[0], "inside_else")
    assert graph.inputs[0].name == "inside_else"
    assert value(graph, "inside_else_1").producer().op_type == "Neg"
    name_lengths(graph, ())
    assert str(value(graph, "inside_then").shape) == "[batch,4]"


def test_inputs_and_outputs_have_the_names_of_the_signature_and_inputs_go_first():
    graph = graph_of()
    name_inputs_and_outputs(graph, ValueNames(graph), ["x"], ["x"])
    assert (graph.inputs[0].name, graph.outputs[0].name) == ("x", "x_1")
    onnx.checker.check_model(ir.to_proto(ir.Model(graph, ir_version=10)))


def test_the_dynamic_first_dimension_is_called_batch_everywhere():
    graph = graph_of(shape=("s77", "2*s77", "s770", 4))
    name_lengths(graph, ())
    assert str(graph.inputs[0].shape) == "[batch,2*batch,s770,4]"
    assert str(graph.outputs[0].shape) == "[batch,2*batch,s770,4]"


def test_symbols_that_are_numbers_become_numbers():
    graph = graph_of(shape=("16", "s77"))
    fix_lengths(graph)
    assert graph.inputs[0].shape[0] == 16
    assert isinstance(graph.inputs[0].shape[1], ir.SymbolicDim)
    fixed = graph_of(shape=(3, 4))
    name_lengths(fixed, ())
    assert list(fixed.inputs[0].shape) == [3, 4]


def lengths_of(*equal, shape=("s77", "s7 + 1", "s12")):
    graph = graph_of(shape=shape)
    name_lengths(graph, equal)
    return str(graph.inputs[0].shape)


def test_equal_lengths_have_one_name():
    first, last = ("a", 0), ("a", 2)
    assert lengths_of(EqualAxes(frozenset({first})), EqualAxes(frozenset({last}))) == "[batch,s7 + 1,s12]"
    assert lengths_of(EqualAxes(frozenset({first, last}))) == "[batch,s7 + 1,batch]"
    assert lengths_of(EqualAxes(frozenset({last}), "frames")) == "[batch,s7 + 1,frames]"
    assert lengths_of(EqualAxes(frozenset({first, last}), "n")) == "[n,s7 + 1,n]"
    assert lengths_of(EqualAxes(frozenset({last}), "batch")) == "[s77,s7 + 1,batch]"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        return self.fc(x) + x


@pytest.mark.medium
def test_nodes_are_named_after_the_ops_of_the_model(tmp_path):
    inputs = torch.randn(2, 3, 8)
    sim = simulate(nn.Sequential(Block(), Block()), inputs)
    export(sim, inputs, tmp_path / "model.onnx")
    nodes = onnx.load(tmp_path / "model.onnx").graph.node
    assert not any(node.name for node in nodes if node.op_type == "Constant")
    names = [node.name for node in nodes if node.name]
    assert {"0.fc/MatMul", "0.fc/Add", "0.add/Add", "1.fc/MatMul", "1.add/Add"} <= set(names)
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(("name", "op"), [
    ("0.fc/MatMul", "0.fc"), ("a/b.fc/MatMul_3_token_7", "a/b.fc"), ("node_Shape_0", None), ("", None),
])
def test_the_op_is_read_back(name, op):
    assert op_of(name) == op


@pytest.mark.medium
def test_parameters_have_the_users_names(tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.add_module("graph", nn.Linear(8, 8))
            self.register_parameter("code", nn.Parameter(torch.randn(8)))

        def forward(self, x):
            return self.graph(x) * self.code

    inputs = torch.randn(2, 8)
    export(simulate(Net(), inputs), inputs, tmp_path / "model.onnx")
    names = {value.name for value in onnx.load(tmp_path / "model.onnx").graph.initializer}
    assert {"graph.bias", "code"} <= {name.partition("/")[0] for name in names}
    assert not any("qtk_members" in name for name in names)
