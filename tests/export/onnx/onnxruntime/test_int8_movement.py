"""Symmetric int8 activations in front of and behind data movement, at every opset."""

import onnx
import pytest
import torch
from torch import nn

import qtk
from tests.export.onnx.optimized import kinds
from tests.export.onnx.simulated import run_onnx


class Moved(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.wide, self.narrow = nn.Conv2d(3, 4, 3), nn.Linear(36, 8), nn.Linear(4, 3)

    def forward(self, x):
        x = nn.functional.max_pool2d(self.conv(x), 2).relu()
        x = self.wide(x.reshape(x.shape[0], -1)).reshape(x.shape[0], 2, 4).transpose(1, 2).squeeze()
        return self.narrow(x.transpose(1, 2).reshape(-1, 4).relu()), x.unsqueeze(1)[:, :, 1:]


def config(granularity):
    return {"version": 1, "defaults": {"weight": {"symmetric": True, "granularity": granularity},
                                       "activation": {"symmetric": True}}}


@pytest.mark.medium
@pytest.mark.sample(1)
@pytest.mark.parametrize("granularity", ["per_channel", "per_tensor"])
@pytest.mark.parametrize("opset", [19, 20, 21, 23])
def test_symmetric_int8_loads_and_runs(opset, granularity, tmp_path):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    sim = qtk.QuantSim(Moved().eval(), x, config=config(granularity))
    sim.compute_encodings([x], progress=False)
    sim.export(tmp_path / "out", formats=("onnx",), opset=opset)
    path = tmp_path / "out" / "model.onnx"
    assert onnx.load(path).opset_import[0].version == opset
    assert kinds(path)["QLinearConv"] == 1
    assert kinds(path)["QGemm"] == 2
    with torch.no_grad():
        expected = sim.model(x)
    step = max(float(encoding.scale.max()) for name, encoding in sim.encodings().items() if ":" in name)
    for optimized in (False, True):
        for ours, theirs in zip(expected, run_onnx(path, x, optimized=optimized), strict=True):
            assert float((ours - torch.from_numpy(theirs)).abs().max()) <= step


@pytest.mark.medium
@pytest.mark.sample(1)
@pytest.mark.parametrize(("given", "opset", "pairs_again"), [
    (config("per_channel"), 19, False), ("default", 21, False), (config("per_channel"), 21, True),
])
def test_pairs_are_repeated_only_where_it_helps(given, opset, pairs_again, tmp_path):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    sim = qtk.QuantSim(Moved().eval(), x, config=given)
    sim.compute_encodings([x], progress=False)
    sim.export(tmp_path / "out", formats=("onnx",), opset=opset)
    made = [node.op_type for node in onnx.load(tmp_path / "out" / "model.onnx").graph.node]
    activations = sum(not site.name.endswith("weight") for site in sim.plan)
    assert (made.count("QuantizeLinear") > activations) == pairs_again
