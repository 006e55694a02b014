"""Files with few bits: ONNX Runtime loads them with its optimizations on, and computes what is simulated."""

import pytest
import torch
from torch import nn

import qtk
from tests.export.onnx.simulated import run_onnx
from tests.zoo.prepared import slow_but


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells, self.head = nn.GRU(6, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.cells(x)[0][:, -1])


MODELS = {
    "clipped": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU6(), nn.Conv2d(8, 4, 3)), (2, 3, 8, 8)),
    "linear": (lambda: nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)), (2, 5, 16)),
    "pooled": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 4)),
               (2, 3, 8, 8)),
    "recurrent": (Recurrent, (2, 3, 6)),
}


@pytest.mark.sample(2)
@pytest.mark.medium
@pytest.mark.parametrize("name", slow_but(MODELS, "linear", "recurrent"))
@pytest.mark.pairwise(activation_bits=(2, 3, 4, 6), weight_bits=(4, 8))
def test_narrow_codes_run(name, activation_bits, weight_bits, tmp_path):
    torch.manual_seed(0)
    make, shape = MODELS[name]
    x = torch.randn(shape)
    sim = qtk.QuantSim(make().eval(), x, weight_bits=weight_bits, activation_bits=activation_bits, config="onnxruntime")
    sim.compute_encodings([x], progress=False)
    sim.export(tmp_path / "out", formats=("onnx",))
    x = 3 * x  # beyond the calibrated ranges, where codes are clipped
    with torch.no_grad():
        expected = sim.model(x)
    step = float(list(sim.encodings().values())[-1].scale)
    for optimized in (False, True):
        (got,) = run_onnx(tmp_path / "out" / "model.onnx", x, optimized=optimized)
        steps = (torch.from_numpy(got) - expected).abs() / step
        assert steps.max() < 1.5  # a value on a rounding edge
        assert (steps > 0.5).float().mean() < 0.1
