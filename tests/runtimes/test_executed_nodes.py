"""What ONNX Runtime makes of files, as its optimized graph says."""

from collections import Counter

import onnx
import pytest
import torch
from torch import nn

import qtk
from qtk.export.onnx.qdq import export
from qtk.runtimes.executed_nodes import computing_kinds, executed_nodes, ops_of_nodes
from qtk.runtimes.session import Optimizations, session_with
from tests.export.onnx.simulated import activations, nothing, simulate, symmetric

INPUTS = torch.randn(2, 3, 8, 8)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(3, 4, 3), nn.LayerNorm([6, 6]), nn.Linear(6, 5)

    def forward(self, x):
        return self.fc(self.norm(self.conv(x)))


def executed(folder, reasons=None, **choices):
    torch.manual_seed(0)
    sim = simulate(Net(), INPUTS, **choices)
    export(sim, INPUTS, folder / "model.onnx")
    session_with(folder / "model.onnx", Optimizations.ON, optimized_file=folder / "optimized.onnx")
    return executed_nodes(folder / "optimized.onnx", folder / "model.onnx", reasons or {})


@pytest.mark.medium
def test_nodes_are_those_of_the_optimized_graph(tmp_path):
    found = executed(tmp_path, weight=symmetric())
    graph = onnx.load(tmp_path / "optimized.onnx").graph
    kinds = Counter(node.op_type for node in graph.node)
    assert found.integer["QLinearConv"] == kinds["QLinearConv"] == 1
    norms = [node for node in found.floats if node.kind == "LayerNormalization"]
    assert [(node.op, node.reason, node.weighted) for node in norms] == [
        ("norm", "ONNX Runtime has no integer kernel for LayerNormalization", False)
    ]


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize(("make", "kind", "x"), [
    (lambda: nn.GRU(6, 5), "GRU", torch.randn(4, 2, 6)),
    (lambda: nn.ConvTranspose2d(3, 4, 3), "ConvTranspose", torch.randn(2, 3, 8, 8)),
])
def test_what_has_no_integer_kernel_says_so(make, kind, x, tmp_path):
    sim = qtk.QuantSim(nn.Sequential(make()).eval(), x, config="onnxruntime")
    sim.compute_encodings([x], progress=False)
    sim.export(tmp_path / "out", formats=["onnx"])
    file = tmp_path / "out" / "model.onnx"
    session_with(file, Optimizations.ON, optimized_file=tmp_path / "optimized.onnx")
    (node,) = [node for node in executed_nodes(tmp_path / "optimized.onnx", file, {}).floats if node.weighted]
    assert (node.kind, node.reason) == (kind, f"ONNX Runtime has no integer kernel for {kind}")


@pytest.mark.medium
@pytest.mark.sample(1)
@pytest.mark.parametrize(("choices", "reason"), [
    ({"activation": nothing}, "input in float (because)"),
    ({"weight": nothing, "activation": lambda site, value: activations()(site, value) if site == "x:input" else None},
     "parameter in float (excluded)"),
    ({"activation": lambda site, value: activations()(site, value) if site == "x:input" else None},
     "output in float (returned to norm)"),
    ({"weight": symmetric("int16"), "activation": activations("uint16")}, "no integer kernel for Conv of uint16"),
])
def test_each_reason_is_found_in_the_exported_graph(choices, reason, tmp_path):
    reasons = {"x:input": "because", "conv.weight": "excluded", "conv:out": "returned to norm"}
    floats = {node.op: node for node in executed(tmp_path, reasons, **choices).floats}
    assert floats["conv"].weighted
    assert floats["conv"].reason.startswith(reason)


@pytest.mark.medium
def test_moved_values_do_not_count_as_computing(tmp_path):
    executed(tmp_path)
    kinds = computing_kinds(tmp_path / "optimized.onnx")
    assert not kinds & Counter(["Transpose", "QuantizeLinear", "DequantizeLinear"])
    assert kinds["QLinearConv"] == 1


@pytest.mark.medium
def test_nodes_belong_to_ops_of_the_model_whatever_they_are_fused_to(tmp_path):
    class Mlp(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x):
            return self.second(torch.relu(self.first(x)))

    x = torch.randn(2, 3, 8)
    sim = qtk.QuantSim(Mlp().eval(), x, config="onnxruntime")  # linear layers on three axes: Reshape, Gemm, Reshape
    sim.compute_encodings([x], progress=False)
    sim.export(tmp_path / "out", formats=["onnx"])
    file, optimized = tmp_path / "out" / "model.onnx", tmp_path / "optimized.onnx"
    session_with(file, Optimizations.ON, optimized_file=optimized)
    kinds = {node.name: node.op_type for node in onnx.load(optimized).graph.node}
    ops = {ops_of_nodes(optimized, file)[name]: kind for name, kind in kinds.items() if kind == "QGemm"}
    assert set(ops) == {"first", "second"}
    assert ops_of_nodes(optimized, file)["x:input/QuantizeLinear"] == "x"


class Masked(nn.Module):
    """A product that reads 0.5 where a mask holds: no code of its other values, so that a Where stays in front."""

    def forward(self, q, mask):
        return (q @ (q + 1).mT).softmax(-1).masked_fill(mask[:, None, None, :], 0.5) @ (q * 2)


@pytest.mark.slow
def test_what_keeps_a_dequantized_value_from_a_product_is_named(tmp_path):
    q, mask = torch.randn(2, 2, 5, 8), torch.tensor([[True] * 5, [True, True, True, False, False]])
    sim = qtk.QuantSim(Masked().eval(), (q, mask), config="onnxruntime")
    sim.compute_encodings([(q, mask)], progress=False)
    sim.export(tmp_path / "out", formats=["onnx"])
    file = tmp_path / "out" / "model.onnx"
    session_with(file, Optimizations.ON, optimized_file=tmp_path / "optimized.onnx")
    graph = onnx.load(file).graph
    makers = {output: node for node in graph.node for output in node.output}
    product = next(node for node in graph.node if node.op_type == "MatMul" and makers[node.input[0]].op_type == "Where")
    assert "DequantizeLinear" in [makers[name].op_type for name in makers[product.input[0]].input[1:] if name in makers]
    reasons = {node.reason for node in executed_nodes(tmp_path / "optimized.onnx", file, {}).floats if node.weighted}
    assert reasons == {"Where stands between DequantizeLinear and MatMul"}
