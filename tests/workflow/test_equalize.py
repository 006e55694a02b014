"""``equalize_model`` through the public functions: on a simulation, saved, loaded, exported, with other weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import qtk
from qtk.demo.digits import calibration_batches, evaluation_batches
from qtk.demo.models import build
from qtk.demo.train import top1
from qtk.errors import CalibrationError, CaptureError
from qtk.nn.channel_clamp import ChannelClamp

BATCHES = [torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
PER_TENSOR = {"version": 1, "extends": "default", "defaults": {"weight": {"granularity": "per_tensor"}}}


def model() -> nn.Module:
    """An inverted residual whose depthwise convolution has channels of very unequal ranges."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 1), nn.ReLU6(), nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.ReLU6(), nn.Conv2d(8, 4, 1),
    ).eval()
    spread = torch.exp2(torch.arange(8.0) - 4)
    with torch.no_grad():
        net[2].weight.mul_(spread.view(-1, 1, 1, 1))
        net[2].bias.mul_(spread)
        net[4].weight.div_(spread.view(1, -1, 1, 1))
    return net


def outputs(sim: qtk.QuantSim) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([sim.model(batch) for batch in BATCHES])


@pytest.mark.medium
def test_per_tensor_weights_lose_less() -> None:
    errors = []
    for equalized in (False, True):
        sim = qtk.QuantSim(model(), BATCHES[0], config=PER_TENSOR, activation_bits=None)
        if equalized:
            result = qtk.equalize_model(sim)
            assert len(result.applied) == 2
            assert result.difference is not None
            assert result.difference < 1e-5
        sim.compute_encodings(BATCHES, progress=False)
        with torch.no_grad():
            expected = torch.cat([model()(batch) for batch in BATCHES])
        errors.append(float((outputs(sim) - expected).norm()))
    assert errors[1] < errors[0] / 3


@pytest.mark.slow
def test_a_trained_net_with_unequal_channels_is_as_good_as_in_float() -> None:
    """Per tensor in 8 bits it loses more than half of its accuracy, equalized less than half a point."""
    net, generator = build("digits_cnn"), torch.Generator().manual_seed(0)
    blocks = net.blocks  # in each pair, channels of the first are multiplied and those of the second divided
    with torch.no_grad():
        for normed, following in (
            (blocks[0].first[1], blocks[0].second), (blocks[1][0][1], blocks[1][1][0]),  # type: ignore[index]
            (blocks[2].first[1], blocks[2].second), (blocks[3][0][1], blocks[3][1][0]),  # type: ignore[index]
        ):
            factor = torch.exp2(torch.rand(normed.num_features, generator=generator) * 10 - 5)
            normed.weight.mul_(factor)
            normed.bias.mul_(factor)
            following.weight.div_(factor.view(1, -1, 1, 1))
    images, labels = (torch.cat(side) for side in zip(*evaluation_batches(), strict=True))
    data = [batch for batch, _ in calibration_batches()]
    accuracy = [top1(net, images, labels)]
    for equalized in (False, True):
        sim = qtk.QuantSim(net, data[0], config=PER_TENSOR)
        if equalized:
            qtk.equalize_model(sim)
        sim.compute_encodings(data, progress=False)
        accuracy.append(top1(sim.model, images, labels))
    assert accuracy[1] < accuracy[0] - 0.2
    assert accuracy[2] >= accuracy[0] - 0.005


@pytest.mark.medium
def test_biases_far_above_zero_are_absorbed() -> None:
    """Batch norms knew how far; the range in front of the layers behind becomes smaller."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))
    nn.init.constant_(net[1].bias[:3], 8.0)
    images = torch.randn(64, 3, 8, 8)
    for _ in range(60):
        net(images)  # running statistics
    net.eval()
    largest = []
    for equalized in (False, True):
        sim = qtk.QuantSim(net, images[:8])
        if equalized:
            names = [group.name for group in qtk.equalize_model(sim).applied]
            assert "bias of 0 → 3" in names
        sim.compute_encodings([images], progress=False)
        largest.append(float(sim.encodings()["2:out"].maximum))
    assert largest[1] < 0.7 * largest[0]


@pytest.mark.medium
def test_a_channel_clamp_is_planned_like_a_clamp() -> None:
    sim = qtk.QuantSim(model(), BATCHES[0])
    before = list(sim.plan)
    qtk.equalize_model(sim)
    assert list(sim.plan) == before
    assert sum(isinstance(module, ChannelClamp) for module in sim.model.modules()) == 2
    sim.compute_encodings(BATCHES, progress=False)
    sim.check()


@pytest.mark.medium
def test_only_what_changed_is_forgotten() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    with torch.no_grad():
        net[2].weight[0] *= 50
    data = [torch.randn(8, 4) for _ in range(2)]
    sim = qtk.QuantSim(net, data[0])
    sim.compute_encodings(data, progress=False)
    kept = sim.encodings()
    qtk.equalize_model(sim)
    assert kept.keys() - sim.encodings().keys() == {"2.weight", "3:out", "4.weight"}
    assert all(torch.equal(encoding.scale, kept[name].scale) for name, encoding in sim.encodings().items())
    sim.compute_encodings(data, only_missing=True, progress=False)
    sim.check()


@pytest.mark.medium
def test_frozen_encodings_in_the_way_are_named_and_nothing_changes() -> None:
    sim = qtk.QuantSim(model(), BATCHES[0])
    sim.compute_encodings(BATCHES, progress=False)
    sim.quantizers["2.weight"].frozen = True
    before, expected = dict(sim.model.named_parameters()), outputs(sim)
    with pytest.raises(CalibrationError, match=r"2\.weight"):
        qtk.equalize_model(sim)
    assert all(parameter is before[name] for name, parameter in sim.model.named_parameters())
    assert torch.equal(outputs(sim), expected)


def test_nothing_to_do_says_so() -> None:
    sim = qtk.QuantSim(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2)), torch.randn(2, 4))
    result = qtk.equalize_model(sim)
    assert str(result) == "equalize: the model has no two layers between which channels may be scaled"
    assert not result.groups


def test_a_prepared_model() -> None:
    net = model()
    prepared = qtk.prepare_model(net, BATCHES[0])
    before = {name: parameter.clone() for name, parameter in net.named_parameters()}
    assert len(qtk.equalize_model(prepared).applied) == 2
    torch.testing.assert_close(prepared(BATCHES[1]), net(BATCHES[1]), rtol=1e-4, atol=1e-5)
    assert all(torch.equal(parameter, before[name]) for name, parameter in net.named_parameters())


def test_other_arguments_are_errors() -> None:
    with pytest.raises(CaptureError, match="Linear; call prepare_model"):
        qtk.equalize_model(nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(CaptureError, match="traced without inputs"):
        qtk.equalize_model(qtk.prepare_model(nn.Linear(2, 2)))


@pytest.mark.medium
def test_saved_and_loaded(tmp_path) -> None:  # type: ignore[no-untyped-def]
    sim = qtk.QuantSim(model(), BATCHES[0])
    qtk.equalize_model(sim)
    sim.compute_encodings(BATCHES, progress=False)
    sim.save(tmp_path / "sim")
    loaded = qtk.QuantSim.load(tmp_path / "sim", model(), BATCHES[0])
    assert torch.equal(outputs(loaded), outputs(sim))


@pytest.mark.medium
def test_a_float_checkpoint_is_equalized_again() -> None:
    sim = qtk.QuantSim(model(), BATCHES[0])
    qtk.equalize_model(sim)
    other = model()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.rand_like(parameter) * 0.1)
    sim.load_float_state_dict(other.state_dict())
    sim.compute_encodings(BATCHES, progress=False)
    for quantizer in sim.quantizers.values():
        quantizer.mode = qtk.Mode.BYPASS
    with torch.no_grad():
        expected = torch.cat([other(batch) for batch in BATCHES])
    torch.testing.assert_close(outputs(sim), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.medium
def test_it_trains_and_moves() -> None:
    sim = qtk.QuantSim(model(), BATCHES[0])
    qtk.equalize_model(sim)
    sim.compute_encodings(BATCHES, progress=False)
    copied = copy.deepcopy(sim.model).double()
    assert copied(BATCHES[0].double()).dtype == torch.float64
    sim.model.train()(BATCHES[0]).square().sum().backward()
    assert all(parameter.grad is not None for parameter in sim.model.parameters())


@pytest.mark.medium
def test_the_exported_file_computes_the_same(tmp_path) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("onnxruntime")
    sim = qtk.QuantSim(model(), BATCHES[0], config="onnxruntime")
    qtk.equalize_model(sim)
    sim.compute_encodings(BATCHES, progress=False)
    sim.export(tmp_path / "files", formats=("onnx",))
    sim.verify_export(tmp_path / "files", BATCHES, turns=0)
