"""Channels of tiny weights with an ordinary bias: the codes of the bias fit, in every verb that chooses scales."""

import numpy as np
import pytest
import torch
from torch import nn

import qtk
from qtk.calibration import calibrate
from qtk.runtimes.session import create_session


def dead(layer):
    """A layer with weights of 1e-6 in one channel, a bias of 5 there and of -0.3 in another."""
    torch.manual_seed(0)
    with torch.no_grad():
        layer.weight[1] *= 1e-6 / layer.weight[1].abs().max()
        layer.bias[1], layer.bias[2] = 5.0, -0.3
    return layer


MODELS = {
    "conv": lambda: (nn.Sequential(dead(nn.Conv2d(4, 8, 3)), nn.ReLU()), (2, 4, 8, 8)),
    "linear": lambda: (nn.Sequential(dead(nn.Linear(16, 8))), (4, 16)),
    "linear of three axes": lambda: (nn.Sequential(dead(nn.Linear(16, 8)), nn.GELU(), nn.Linear(8, 4)), (2, 4, 16)),
}


def simulated(name, config="onnxruntime"):
    model, shape = MODELS[name]()
    x = torch.randn(*shape)
    sim = qtk.QuantSim(model.eval(), x, config=config)
    sim.compute_encodings([x], progress=False)
    return model, sim, x


def difference_in_steps(sim, x, folder, *, optimized):
    sim.export(folder, formats=["onnx"])
    session, _ = create_session(folder / "model.onnx", optimized=optimized)
    (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    step = float(list(sim.encodings().values())[-1].scale)
    return np.abs(got - sim.model(x).detach().numpy()).max() / step


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.pairwise(name=MODELS, config=("onnxruntime", "onnxruntime_vnni"), optimized=(False, True))
def test_dead_channels_are_exact(name, config, optimized, tmp_path):
    model, sim, x = simulated(name, config)
    with torch.no_grad():
        assert (sim.model(x) - model(x)).abs().max() < 0.05  # 5 before
    assert difference_in_steps(sim, x, tmp_path / "out", optimized=optimized) <= 1.01


@pytest.mark.medium
def test_without_the_floor_the_bias_is_cut_off_and_the_file_says_the_same(monkeypatch, tmp_path):
    monkeypatch.setattr(calibrate, "raise_scales", lambda simulation: None)
    model, sim, x = simulated("linear")
    with torch.no_grad():
        assert (sim.model(x) - model(x))[:, 1].abs().min() > 4
    assert difference_in_steps(sim, x, tmp_path / "out", optimized=True) <= 1.01


def test_only_the_dead_channel_changes_and_by_no_more_than_needed():
    _, sim, _ = simulated("linear")
    encodings = sim.encodings()
    scale, of_input, bias = (encodings[name].scale for name in ("0.weight", "input:input", "0.bias"))
    weight = sim.model.get_parameter("0.weight").detach()
    others = [index for index in range(8) if index != 1]
    assert torch.equal(scale[others], (weight.abs().amax(1) / 64)[others])
    codes = 5.0 / (scale[1].double() * of_input.double())
    assert 2**30 * (1 - 1e-5) < codes < 2**30
    assert torch.equal(bias, scale * of_input)


def test_frozen_scales_stay():
    model, shape = MODELS["linear"]()
    x = torch.randn(*shape)
    sim = qtk.QuantSim(model, x, config="onnxruntime")
    sim.compute_encodings([x], sites="0.weight", progress=False)
    sim.freeze("0.weight")
    before = sim.encodings()["0.weight"]
    sim.compute_encodings([x], progress=False)
    assert sim.encodings()["0.weight"].equals(before)


@pytest.mark.medium
@pytest.mark.parametrize("apply", [qtk.apply_seq_mse, qtk.apply_gptq])
def test_layer_wise_methods_keep_the_bias_within_its_codes(apply):
    model, sim, x = simulated("linear")
    apply(sim, [x], progress=False)
    with torch.no_grad():
        assert (sim.model(x) - model(x))[:, 1].abs().max() < 0.1
