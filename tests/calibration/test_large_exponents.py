import pytest
import torch
from torch import nn

import qtk


class Decay(nn.Module):
    """The decay of a state-space model: exp of numbers down to -40."""

    def forward(self, t, x):
        return (t[:, None] * torch.tensor([-1.0, -4.0, -40.0])).exp() * x


@pytest.mark.medium
@pytest.mark.parametrize(("largest", "is_float"), [(1.0, True), (0.1, False)])  # steps of 0.16 and 0.016
def test_large_arguments_of_an_exponential_stay_in_float(largest, is_float):
    t, x = torch.linspace(0, largest, 64), torch.ones(64, 3)
    sim = qtk.QuantSim(Decay(), (t, x), config="onnxruntime")
    assert "mul:out" in sim.quantizers
    sim.compute_encodings([(t, x)], progress=False)
    assert ("mul:out" not in sim.quantizers) == is_float
    expected = Decay()(t.double(), x.double())
    error = (sim.model(t, x) - expected).square().sum() / expected.square().sum()
    assert -10 * error.log10() > 35
    if is_float:
        (reason,) = (why for site, why in sim.plan.unquantized.items() if site.name == "mul:out")
        assert "only an exponential reads it" in reason
    sim.compute_encodings([(t / 100, x)], progress=False)
    assert "mul:out" in sim.quantizers  # another calibration decides anew


@pytest.mark.medium
def test_a_target_without_floats_keeps_them():
    t, x = torch.linspace(0, 1, 64), torch.ones(64, 3)
    sim = qtk.QuantSim(Decay(), (t, x), config="qnn_htp")
    sim.compute_encodings([(t, x)], progress=False)
    assert "mul:out" in sim.quantizers
