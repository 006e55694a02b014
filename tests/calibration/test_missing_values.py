"""NaN that stands for missing values, until a model replaces it."""

import pytest
import torch
import yaml
from torch import nn

import qtk
from qtk.errors import CalibrationError


class Missing(nn.Module):
    """NaN stands for what is missing, behind arithmetic."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, x):
        is_missing = x.isnan()
        return self.layer(torch.cat([torch.where(is_missing, 0.0, (x - 0.1) / 0.7), is_missing.float()], 1))


def test_errors_of_nan_lead_to_settings_that_keep_it():
    x = torch.randn(64, 3)
    x[::7, 1] = torch.nan
    config = {"version": 1, "extends": "onnxruntime", "rules": []}
    for named in ("io: {inputs: float}", "{path: sub}", "{path: div}"):
        with pytest.raises(CalibrationError, match=r"if NaN marks what is missing, ") as told:
            qtk.QuantSim(Missing().eval(), x, config=config).compute_encodings([x], progress=False)
        assert named in str(told.value)
        advice = yaml.safe_load(f"{{{str(told.value).rpartition('missing, ')[2]}}}")
        config = {**config, **advice, "rules": [*config["rules"], *advice.get("rules", [])]}
    sim = qtk.QuantSim(Missing().eval(), x, config=config)
    sim.compute_encodings([x], progress=False)
    assert "layer.weight" in sim.quantizers
    assert sim.model(x).isfinite().all()
