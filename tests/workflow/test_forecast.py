"""Forecasts against counts by hand: the shapes are known, and nothing is computed."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import qtk
from qtk.layerwise.gptq import Gptq
from qtk.layerwise.options import DEFAULT
from qtk.layerwise.reconstruction import Reconstruction
from qtk.layerwise.seq_mse import SeqMse
from qtk.layerwise.weighted_layers import weighted_layers
from qtk.nn.mapped_weights import bounded
from qtk.workflow import forecast as forecasting
from qtk.workflow.forecast import Forecast, forecast

WIDTH, ROWS = 64, 32


def sim_of(device="cpu"):
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH)).to(device).eval()
    return qtk.QuantSim(model, torch.ones(ROWS, WIDTH, device=device), weight_bits=4, activation_bits=None)


def test_parts_are_those_of_the_shapes():
    sim, gptq = sim_of(), [Gptq()]
    found = forecast(sim.simulation, gptq, batches=3, scale=2.0, options=replace(DEFAULT, holdout=0))
    between = 2 * ROWS * 4 * WIDTH * 4  # the output of the ReLU, of calls twice as large as the example
    assert found.parts["values between layers"] == 2 * 3 * between
    assert found.parts["statistics"] == (4 * WIDTH + WIDTH) * 4 * WIDTH * 4  # H and wᵀ E of the second layer
    assert found.parts["float weights"] == 2 * 4 * WIDTH**2 * 4
    held_out = forecast(sim.simulation, gptq, batches=3, scale=2.0)
    assert held_out.parts["statistics"] == 2 * found.parts["statistics"]
    disk = forecast(sim.simulation, gptq, batches=3, scale=2.0, options=replace(DEFAULT, offload="disk"))
    assert disk.parts["values between layers"] == 2 * between
    assert disk.parts["float weights"] == 0
    assert "float weights" not in forecast(sim.simulation, [SeqMse()]).parts  # it changes encodings alone
    pruned = forecast(sim.simulation, [SeqMse()], options=replace(DEFAULT, sparsity="2:4"))
    assert pruned.parts["float weights"] == found.parts["float weights"]
    assert found.multiplications > 2 * 3 * 2 * ROWS * 2 * 4 * WIDTH**2
    assert forecast(sim.simulation).peak_bytes < found.peak_bytes


class WideBesideLarge(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.small, self.large = nn.Linear(8, 4096), nn.Linear(8, 512), nn.Linear(512, 512)

    def forward(self, x):
        wide, small = self.wide(x), self.small(x)
        summed = wide.sum(-1)
        return self.large(small), summed


def test_layers_of_one_input_have_sums_for_any_weight():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.third = (nn.Linear(WIDTH, 8) for _ in range(3))

        def forward(self, x):
            return self.first(x) + self.second(x), self.third(x.relu())

    sim = qtk.QuantSim(Two().eval(), torch.ones(ROWS, WIDTH), weight_bits=4, activation_bits=None)
    found = forecast(sim.simulation, [Gptq()], batches=1, options=replace(DEFAULT, holdout=0))
    assert found.parts["statistics"] == 2 * WIDTH**2 * 4  # of the first two; the third alone has (64 + 8) * 64
    values = forecasting._values(sim.simulation, weighted_layers(sim.model, sim.plan)[0], 1.0)
    assert values.alone == {"third.weight"}


def test_values_count_that_are_there_at_the_layer_that_takes_most():
    sim = qtk.QuantSim(WideBesideLarge().eval(), torch.ones(4, 8), weight_bits=8, activation_bits=None)
    found = forecast(sim.simulation, [Gptq()], batches=3, options=replace(DEFAULT, holdout=0))
    assert found.parts["values between layers"] == 2 * 3 * 4 * (512 + 1) * 4
    assert found.parts["one batch"] >= 2 * 4 * 4096 * 4


def test_a_model_without_values_has_the_same_forecast():
    one, other = (forecast(sim_of(device).simulation, [Gptq()], batches=2) for device in ("cpu", "meta"))
    assert one == other


def test_weights_of_files_count_until_they_are_in_memory(tmp_path):
    layers = nn.Sequential(nn.Linear(512, 1024), nn.Linear(1024, 512))
    save_file(layers.state_dict(), tmp_path / "model.safetensors")
    sim = qtk.QuantSim.from_checkpoint(tmp_path, torch.ones(8, 512), model=lambda: nn.Sequential(
        nn.Linear(512, 1024), nn.Linear(1024, 512)), config="weight_only_int4", verify=False)
    with bounded(sim.model, limit_bytes=0):
        pass
    before = forecast(sim.simulation, [Gptq()]).parts["weights of files"]
    assert 0.9 < before / 2**22 < 1.1
    for each in sim.model.parameters():
        each.sum()
    assert forecast(sim.simulation, [Gptq()]).parts["weights of files"] == 0
    assert "weights of files" not in forecast(sim_of().simulation, [Gptq()]).parts


@pytest.mark.medium
def test_what_does_not_fit_is_said_with_what_does(monkeypatch, capsys):
    sim = sim_of()
    peaks = [forecast(sim.simulation, [Gptq()], batches=50, options=replace(DEFAULT, offload=each)).peak_bytes
             for each in ("none", "disk")]
    assert peaks[1] < peaks[0]
    monkeypatch.setattr(forecasting, "available_bytes", lambda: sum(peaks) // 2)
    lines = list(forecasting.forecast_lines(sim.simulation, "gptq", [Gptq()], 50))
    assert ["does not fit" in line for line in lines] == [True, False]
    monkeypatch.setattr(forecasting, "is_large", lambda model: True)
    x = [torch.randn(ROWS, WIDTH) for _ in range(50)]
    sim.compute_encodings(None, progress=False)
    qtk.apply_gptq(sim, x)
    assert 'offload="disk") takes' in capsys.readouterr().err


def test_calibration_counts_the_calls_and_unknown_methods_are_named():
    sim = qtk.QuantSim(nn.Linear(WIDTH, WIDTH).eval(), torch.ones(ROWS, WIDTH)).simulation
    one, three = (forecast(sim, batches=batches, scale=2.0).multiplications for batches in (1, 3))
    assert three - one == 2 * 2 * ROWS * WIDTH**2
    found = forecast(sim, [Gptq(), Reconstruction()])
    assert found.uncounted == ("Reconstruction",)
    assert found.text(1e9).endswith(", and what Reconstruction takes, which is not counted")


def test_files_in_the_cache_of_a_container_can_be_given_back(monkeypatch, tmp_path):
    for name, content in {"max": "1000", "current": "900", "stat": "anon 100\ninactive_file 700\n"}.items():
        (tmp_path / f"memory.{name}").write_text(content)
    monkeypatch.setattr(forecasting, "CGROUP", tmp_path)
    assert forecasting.available_bytes() == 800


def test_a_forecast_is_one_line():
    text = Forecast({"values between layers": 10**9, "solving": 10**7}, 6e13).text(1e9)
    assert text == "peak 1.0 GB more than now (values between layers 1.0), about 16.7 h"
