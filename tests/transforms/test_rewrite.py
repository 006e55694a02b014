"""What all transforms on a simulation have in common."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import qtk
from qtk.errors import CalibrationError, ConfigError


def unequal() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)).eval()
    with torch.no_grad():
        model[1].weight[0] *= 50  # type: ignore[index]
        model[0].weight[0] *= 50
    return model


BATCHES = [torch.randn(16, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
TRANSFORMS = {
    "equalize": qtk.equalize_model,
    "smooth_quant": lambda sim: qtk.apply_smooth_quant(sim, BATCHES, alpha=0.5, progress=False),
}


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_rounded_weights_are_refused_also_once_they_are_not_frozen(transform) -> None:  # type: ignore[no-untyped-def]
    sim = qtk.QuantSim(unequal(), BATCHES[0])
    sim.compute_encodings(BATCHES, progress=False)
    qtk.apply_layerwise(sim, BATCHES, "gptq", options=qtk.LayerwiseOptions(holdout=0), progress=False)
    sim.unfreeze()
    before = {name: parameter.clone() for name, parameter in sim.model.named_parameters()}
    with pytest.raises(CalibrationError, match=r"1\.weight.* rounded.*before layer-wise methods"):
        transform(sim)
    assert all(torch.equal(parameter, before[name]) for name, parameter in sim.model.named_parameters())
    assert len(sim.encodings()) == len(sim.quantizers)


@pytest.mark.medium
def test_a_converted_model_is_proved_in_its_own_dtype() -> None:
    sim = qtk.QuantSim(unequal(), BATCHES[0])
    sim.model.double()
    result = qtk.equalize_model(sim)
    assert result.applied
    assert result.difference is not None
    assert 0 < result.difference < 1e-14


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1)).eval()


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("match", [{"path": "1"}, {"op": "batch_norm"}])
def test_a_rule_whose_op_a_transform_removes_has_had_its_effect(match, tmp_path) -> None:  # type: ignore[no-untyped-def]
    rules = [{"match": match, "weight": {"bits": 8}, "output": {"bits": 16}}]
    config = {"version": 1, "fold_batch_norms": False, "rules": rules}
    images = torch.randn(2, 3, 6, 6)
    sim = qtk.QuantSim(normed(), images, config=config)
    assert qtk.fold_batch_norms(sim).applied
    sim.compute_encodings([images], progress=False)
    sim.save(tmp_path / "saved")
    again = qtk.QuantSim.load(tmp_path / "saved", normed(), images)
    assert torch.equal(again.model(images), sim.model(images))
    assert again.config == sim.config
    with pytest.raises(ConfigError, match=r"rules\[0\]"):
        qtk.QuantSim(normed(), images, config={**config, "fold_batch_norms": True})
