"""Values with a scale for each head, in ONNX Runtime's optimized graph: what is simulated, in float operators."""

import onnx
import pytest
import torch
from torch import nn

import qtk
from qtk.runtimes.session import create_session
from tests.exported_files import leave_out

AXIS = {"bits": 8, "symmetric": True, "granularity": "per_channel", "axis": 1}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(6, 6)

    def forward(self, x, past):
        keys = torch.cat([past, self.project(x).view(2, 1, 2, 3).transpose(1, 2)], 2)
        return x.view(2, 1, 2, 3).transpose(1, 2) @ keys.transpose(2, 3)


def deployed(folder, *, symmetric=True):
    """The output of the simulation and of its file, and the operators of the optimized graph."""
    torch.manual_seed(0)
    inputs = torch.randn(2, 1, 6), torch.randn(2, 2, 1, 3) * torch.tensor([1.0, 30.0])[:, None, None]
    rules = [{"match": {"op": "concat"}, "output": {**AXIS, "symmetric": symmetric}},
             {"match": {"op": "matmul"}, "output": "float"}]
    sim = qtk.QuantSim(Attention().eval(), inputs, config={"version": 1, "rules": rules})
    sim.compute_encodings([inputs], progress=False)
    sim.export(folder / "out", formats="onnx", check=False)
    with torch.no_grad():
        expected = sim.model(*inputs)
    session, _ = create_session(folder / "out" / "model.onnx", optimized_file=folder / "optimized.onnx")
    kinds = {node.op_type for node in onnx.load(folder / "optimized.onnx").graph.node}
    (got,) = session.run(None, {"x": inputs[0].numpy(), "past": inputs[1].numpy()})
    return expected, torch.from_numpy(got), kinds


@pytest.mark.medium
@pytest.mark.parametrize("symmetric", [True, False])
def test_scales_of_heads_are_not_taken_for_scales_of_columns(symmetric, tmp_path):
    expected, got, kinds = deployed(tmp_path, symmetric=symmetric)
    assert torch.allclose(got, expected, atol=1e-5)
    assert "Max" in kinds
    assert not kinds & {"QLinearConcat", "QLinearMatMul"}


@pytest.mark.medium
def test_without_it_onnx_runtime_refuses_its_own_fusion(tmp_path, monkeypatch):
    leave_out(monkeypatch, "keep_axis_scales_float")
    with pytest.raises(Exception, match="MatMulIntegerToFloat"):
        deployed(tmp_path)
