"""What crosses the boundary of a Scan, what ONNX Runtime makes of the body, and that no value changes."""

from collections import Counter

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import qtk
from qtk.calls.signature import output_nodes
from qtk.export.onnx.qdq import export
from qtk.runtimes.session import create_session
from tests.export.onnx.simulated import run_onnx, run_simulation
from tests.exported_files import leave_out

I, H = 8, 16  # noqa: E741


class Net(nn.Module):
    """An LSTM whose first states are zeros, ones, or inputs."""

    def __init__(self, first=None):
        super().__init__()
        self.net, self.first = nn.LSTM(I, H), first

    def forward(self, x, *states):
        if self.first is not None:
            states = tuple(torch.full((1, x.shape[1], H), self.first) for _ in range(2))
        return self.net(x, states or None)[0]


INT8 = {"version": 1, "extends": "default", "rules": [{"match": {"op": "lstm"}, "inside": "int8"}]}


def quantized(model, *inputs, config="default"):
    torch.manual_seed(0)
    prepared = qtk.prepare_model(model.eval(), inputs, dynamic_shapes="all", verify=False)
    sim = qtk.QuantSim(prepared, inputs, config=config)
    sim.compute_encodings([inputs])
    return sim


def body_of(path):
    """The only Scan of a file: the types of its inputs and outputs in the body, and its operators."""
    (scan,) = (node for node in onnx.load(path).graph.node if node.op_type == "Scan")
    (body,) = (attribute.g for attribute in scan.attribute if attribute.name == "body")
    inputs, outputs = ([onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type) for value in values]
                       for values in (body.input, body.output))
    return inputs, outputs, Counter(node.op_type for node in body.node)


def optimized(path, tmp_path):
    create_session(path, threads=1, optimized_file=tmp_path / "optimized.onnx")
    return body_of(tmp_path / "optimized.onnx")[2]


@pytest.mark.medium
@pytest.mark.sample(1)
@pytest.mark.parametrize("first", [None, 0.0])
def test_codes_are_carried_and_the_runtime_computes_the_cell_in_integers(first, tmp_path):
    x, path = torch.randn(5, 2, I), tmp_path / "model.onnx"
    sim = quantized(Net(first), x, config=INT8)
    export(sim.model, x, path)
    assert body_of(path)[:2] == (["UINT8"] * 3, ["UINT8"] * 3)
    kinds = optimized(path, tmp_path)
    assert {kind: kinds[kind] for kind in ("QGemm", "QLinearAdd", "QLinearSigmoid", "QLinearMul")} == {
        "QGemm": 1, "QLinearAdd": 1, "QLinearSigmoid": 3, "QLinearMul": 1,
    }
    assert kinds["Gemm"] + kinds["MatMul"] + kinds["Sigmoid"] == 0
    other = torch.randn(9, 3, I)
    for runtime in (False, True):
        (found,), (expected,) = run_onnx(path, other, optimized=runtime), run_simulation(sim.model, other)
        assert (np.abs(found - expected) > 1e-6).mean() <= 0.02


@pytest.mark.medium
def test_a_cell_state_of_16_bits_is_carried_in_codes(tmp_path):
    x, path = torch.randn(5, 2, I), tmp_path / "model.onnx"
    sim = quantized(Net(), x)
    export(sim.model, x, path)
    assert body_of(path)[:2] == (["UINT8", "UINT16", "FLOAT"], ["UINT8", "UINT16", "UINT8"])
    other = torch.randn(9, 3, I)
    for runtime in (False, True):
        (found,), (expected,) = run_onnx(path, other, optimized=runtime), run_simulation(sim.model, other)
        assert (np.abs(found - expected) > 1e-6).mean() <= 0.02


@pytest.mark.medium
def test_states_off_the_grid_stay_float(tmp_path):
    """0.3 is on no grid of these states; quantizing it first would change the first time step."""
    x, path = torch.randn(5, 2, I), tmp_path / "model.onnx"
    sim = quantized(Net(0.3), x)
    export(sim.model, x, path)
    inputs, outputs, _ = body_of(path)
    assert (inputs, outputs) == (["FLOAT", "FLOAT", "FLOAT"], ["FLOAT", "FLOAT", "UINT8"])
    assert np.abs(run_onnx(path, x)[0] - run_simulation(sim.model, x)[0]).max() < 1e-6


@pytest.mark.slow
def test_states_that_are_inputs_stay_float(tmp_path):
    given, path = (torch.randn(5, 2, I), torch.randn(1, 2, H), torch.randn(1, 2, H)), tmp_path / "model.onnx"
    sim = quantized(Net(), *given)
    export(sim.model, given, path)
    assert body_of(path)[0] == ["FLOAT", "FLOAT", "FLOAT"]
    for runtime in (False, True):
        found, expected = run_onnx(path, *given, optimized=runtime)[0], run_simulation(sim.model, *given)[0]
        assert (np.abs(found - expected) > 1e-6).mean() <= 0.02


@pytest.mark.slow
def test_outputs_keep_their_names(tmp_path):
    x, path = torch.randn(5, 2, I), tmp_path / "model.onnx"
    sim = quantized(nn.LSTM(I, H), x)
    export(sim.model, x, path)
    codes = {node.input[0] for node in onnx.load(path).graph.node if node.op_type == "DequantizeLinear"}
    outputs = [value.name for value in onnx.load(path).graph.output]
    assert outputs == list(output_nodes(sim.model))
    assert not codes & set(outputs)


@pytest.mark.slow
def test_no_value_changes(tmp_path, monkeypatch):
    torch.manual_seed(1)
    x = torch.randn(6, 4, I)
    sim = quantized(nn.GRU(I, H, bidirectional=True), x)
    export(sim.model, x, tmp_path / "codes.onnx")
    leave_out(monkeypatch, "carry_codes")
    export(sim.model, x, tmp_path / "floats.onnx")
    for codes, floats in zip(*(run_onnx(tmp_path / name, x) for name in ("codes.onnx", "floats.onnx")), strict=True):
        assert np.array_equal(codes, floats)
