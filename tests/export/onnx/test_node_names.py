import onnx
import pytest
import torch
from torch import nn

from qtk.export.onnx.node_names import op_of
from qtk.export.onnx.qdq import export
from tests.export.onnx.simulated import simulate


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
