"""Averages of models: torch's EMA and SWA, timm's EMA."""

import copy
import json

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import qtk
from qtk.core.dtypes import dtype
from qtk.core.encoding import Encoding
from qtk.core.granularity import PerChannel
from qtk.core.spec import QuantSpec
from qtk.quantizers.quantizer import Mode, Quantizer
from tests.training.test_learned_ranges import batches, equal_encodings, net, optimizer_of, simulated, train


class Timm:
    def __init__(self, model):
        timm = pytest.importorskip("timm")
        self.ema = timm.utils.ModelEmaV3(model, decay=0.9)
        self.module, self.update_parameters = self.ema.module, self.ema.update


AVERAGES = {
    "ema": lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
    "ema with buffers": lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True),
    "swa": AveragedModel,
    "swa with buffers": lambda model: AveragedModel(model, use_buffers=True),
    "timm": Timm,
}


@pytest.mark.parametrize("average", AVERAGES.values(), ids=AVERAGES)
def test_the_average_of_equal_models_has_every_code_of_a_zero_point(average):
    spec = QuantSpec(dtype("uint8"), PerChannel(0))
    quantizer = Quantizer(spec, site="x:out")
    encoding = Encoding(spec, torch.rand(256) + 0.1, torch.arange(256, dtype=torch.int32))
    quantizer.load_encoding(encoding)
    quantizer.mode = Mode.SIMULATE
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), quantizer)  # timm asks for the device of a parameter
    averaged = average(model)
    for _ in range(5):
        averaged.update_parameters(model)
    assert torch.equal(averaged.module[1].encoding.zero_point, encoding.zero_point)
    torch.testing.assert_close(averaged.module[1].encoding.scale, encoding.scale, rtol=1e-6, atol=0)


@pytest.mark.sample(3)
@pytest.mark.medium
@pytest.mark.parametrize("learned", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("average", AVERAGES.values(), ids=AVERAGES)
def test_the_average_of_a_training_is_evaluated_saved_and_goes_back_into_the_simulation(average, learned, tmp_path):
    sim = simulated()
    sim.freeze("0.weight")
    if learned:
        sim.learn_ranges()
    optimizer = optimizer_of(sim) if learned else torch.optim.Adam(sim.model.parameters(), lr=0.01)
    averaged = average(sim.model)
    for _ in range(4):
        train(sim, optimizer, steps=1)
        averaged.update_parameters(sim.model)
    averaged.module.eval()
    with torch.no_grad():
        expected = averaged.module(batches()[0])
    if learned:
        scales = [q.encoding.scale for q in averaged.module.modules() if isinstance(q, Quantizer) and q.learns_range]
        assert len(scales) == len(sim.quantizers) - 1
    target = copy.deepcopy(sim)
    target.model.load_state_dict(averaged.module.state_dict())
    target.model.eval()
    target.check()
    target.save(tmp_path / "sim")
    again = qtk.QuantSim.load(tmp_path / "sim", net(), batches()[0])
    with torch.no_grad():
        assert torch.equal(target.model(batches()[0]), expected)
        assert torch.equal(again.model(batches()[0]), expected)
    assert again.quantizers["0.weight"].frozen
    assert again.quantizers["1:out"].learns_range == learned
    assert equal_encodings(again.encodings(), target.encodings())


@pytest.mark.medium
def test_an_average_between_two_zero_points_is_rounded_where_it_is_used_and_saved_as_it_is(tmp_path):
    sim = simulated()
    quantizer = sim.quantizers["3:out"]
    averaged = AveragedModel(sim.model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    averaged.update_parameters(sim.model)
    start = quantizer.encoding
    moved = start.zero_point + 4
    quantizer.load_encoding(Encoding(start.spec, start.scale, moved.clamp(max=15)))
    codes = [int(start.zero_point)]
    for _ in range(30):
        averaged.update_parameters(sim.model)
        sim_of_average = copy.deepcopy(sim)
        sim_of_average.model.load_state_dict(averaged.module.state_dict())
        codes.append(int(sim_of_average.encodings()["3:out"].zero_point))
    assert codes == sorted(codes)
    assert codes[-1] == int(moved)  # an int32 buffer would stand still below it
    fraction = float(sim_of_average.quantizers["3:out"].zero_point)
    assert fraction != round(fraction)
    sim_of_average.export(tmp_path / "files", formats=["encodings"])
    exported = json.loads((tmp_path / "files" / "encodings.json").read_text())
    assert f'"zero_point": [{int(moved)}]' in json.dumps(exported)
    sim_of_average.save(tmp_path / "sim")
    again = qtk.QuantSim.load(tmp_path / "sim", net(), batches()[0])
    assert float(again.quantizers["3:out"].zero_point) == fraction
