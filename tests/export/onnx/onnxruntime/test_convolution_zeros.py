"""Zero points of the weights of convolutions: left out where these are integer, stored where they are float."""

import onnx
import pytest
import torch
from torch import nn

import qtk
from qtk.runtimes.session import Optimizations, session_with
from tests.export.onnx.onnxruntime.test_flat_linears import optimized_kinds


class Patches(nn.Module):
    """The beginning of a vision transformer: what the convolution makes is joined with a token, and feeds a norm."""

    def __init__(self):
        super().__init__()
        self.first, self.patch, self.norm = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 16, 2, 2), nn.LayerNorm(16)
        self.token = nn.Parameter(torch.randn(1, 1, 16))

    def forward(self, x):
        x = self.patch(self.first(x).relu()).flatten(2).transpose(1, 2)
        return self.norm(torch.cat([self.token.expand(len(x), 1, 16), x], 1))


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("config", ["default", "onnxruntime"])
def test_a_file_with_a_float_convolution_runs_in_the_exact_mode(config, tmp_path):
    torch.manual_seed(0)
    x, folder = torch.randn(2, 3, 10, 10), tmp_path / "out"
    sim = qtk.QuantSim(Patches().eval(), x, config=config)
    sim.compute_encodings([x], progress=False)
    sim.export(folder, formats=["onnx"])
    integer = optimized_kinds(folder)["QLinearConv"]
    stored = {each.name for each in onnx.load(folder / "model.onnx").graph.initializer}
    assert ("patch.weight.zero_point" in stored) is (integer == 1)
    assert (integer == 1) is (config == "default")  # 16 bits, which no integer convolution makes
    assert "first.weight.zero_point" not in stored
    session, _ = session_with(folder / "model.onnx", Optimizations.EXACT)
    (got,) = session.run(None, {"x": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(got), sim.model(x), atol=0.05, rtol=0)
