import pytest
import torch
from torch import nn

import qtk
from qtk.errors import ConfigError
from qtk.workflow.transforms import TRANSFORMS, transform


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("name", TRANSFORMS)
def test_every_registered_transform_rewrites_a_simulation(name):
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Conv2d(8, 2, 1)]
    model, x = nn.Sequential(*layers).eval(), torch.randn(8, 3, 8, 8)
    with torch.no_grad():
        model[3].weight[:2] *= 50
        model[5].weight[:, :2] /= 50
    live = {"version": 1, "extends": "default", "fold_batch_norms": False}
    sim = qtk.QuantSim(model, x, config=live)
    result = transform(name).apply(sim, iter(x.split(2)), num_batches=4)
    assert result.transform == name
    assert result.applied


def test_settings_are_checked_by_name():
    assert transform("smooth_quant(alpha=0.5)") == transform("smooth_quant(alpha=0.5)")
    for text in ("smooth_quant(alpha=1.5)", "smooth_quant(beta=1)", "equalize(alpha=1)", "unknown"):
        with pytest.raises(ConfigError):
            transform(text)
