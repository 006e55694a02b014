"""Weights of float operators: stored as codes, dequantized once by ONNX Runtime when it loads the file."""

import onnx
import pytest
import torch
from torch import nn

from tests.export.onnx.onnxruntime.test_flat_linears import exported, optimized_kinds, steps
from tests.export.onnx.simulated import run_onnx
from tests.exported_files import leave_out

X = torch.randn(2, 5, 8)
FLOAT = {"version": 1, "extends": "onnxruntime", "rules": [{"match": {"op": ["lstm", "gru"]}, "inside": "float"}]}


class First(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x)[0]


NETS = {
    "lstm": lambda: nn.LSTM(8, 16, 2), "gru": lambda: nn.GRU(8, 16, bidirectional=True),
    "no bias": lambda: nn.LSTM(8, 16, bias=False),
}


@pytest.mark.medium
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", list(NETS))
def test_a_recurrent_net_is_its_operator_with_constant_weights(name, tmp_path):
    sim = exported(First(NETS[name]()), X, tmp_path / "out", config=FLOAT)
    kinds = optimized_kinds(tmp_path / "out")
    assert kinds["LSTM"] + kinds["GRU"] >= 1
    assert kinds["Scan"] == 0
    assert not _dequantized_constants(tmp_path / "out" / "optimized.onnx")
    for optimized in (False, True):
        assert _difference(sim, tmp_path / "out", optimized=optimized) < 1e-5


@pytest.mark.medium
def test_what_has_no_operator_is_a_scan(tmp_path):
    sim = exported(First(nn.LSTM(8, 16, proj_size=4)), X, tmp_path / "out")
    assert optimized_kinds(tmp_path / "out")["Scan"] == 1
    assert _difference(sim, tmp_path / "out", optimized=True) < 1e-5


@pytest.mark.medium
def test_an_embedding_dequantizes_no_table_at_run_time(tmp_path):
    tokens = torch.randint(0, 50, (2, 5))
    model = nn.Sequential(nn.Embedding(50, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    sim = exported(model, tokens, tmp_path / "out")
    optimized_kinds(tmp_path / "out")
    assert steps(sim, tokens, tmp_path / "out", optimized=True).max() < 1.01
    assert not _dequantized_constants(tmp_path / "out" / "optimized.onnx")


@pytest.mark.parametrize("config", ["openvino", FLOAT])
def test_a_runtime_that_reads_no_functions_gets_none(config, tmp_path):
    sim = exported(First(nn.LSTM(8, 16)), X, tmp_path / "out", config=config)
    model = onnx.load(tmp_path / "out" / "model.onnx")
    assert ({node.domain for node in model.graph.node} == {""}) is (not model.functions) is (config == "openvino")
    assert {tensor.name for tensor in model.graph.initializer if tensor.data_type == onnx.TensorProto.INT8} >= {
        "net.weight_ih_l0", "net.weight_hh_l0"}
    assert _difference(sim, tmp_path / "out", optimized=False) < 1e-5


@pytest.mark.slow
def test_without_it_weights_are_dequantized_at_every_run(tmp_path, monkeypatch):
    leave_out(monkeypatch, "dequantize_when_loaded")
    exported(First(nn.LSTM(8, 16)), X, tmp_path / "out", config=FLOAT)
    optimized_kinds(tmp_path / "out")
    found = _dequantized_constants(tmp_path / "out" / "optimized.onnx")
    assert {name.partition("@")[0] for name in found} == {"net.weight_ih_l0", "net.weight_hh_l0"}


def _difference(sim, folder, *, optimized):
    """The largest from the simulation, of outputs that are not quantized."""
    (found,) = run_onnx(folder / "model.onnx", X, optimized=optimized)
    with torch.no_grad():
        return abs(found - sim.model(X).numpy()).max()


def _dequantized_constants(path):
    graph = onnx.load(path).graph
    constants = {tensor.name for tensor in graph.initializer}
    return {node.input[0] for node in graph.node if node.op_type == "DequantizeLinear"} & constants
