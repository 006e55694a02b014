import pytest
import torch
from torch import nn

import qtk
from qtk.capture.restored import restored
from qtk.capture.written_parameters import finding_written_parameters, written_parameters


class Clamps(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class ClampsData(nn.Linear):
    def forward(self, x):
        self.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


class AssignsData(nn.Linear):
    def forward(self, x):
        self.weight.data = self.weight.data.clamp(-0.1, 0.1)
        return super().forward(x)


def test_a_written_parameter_is_known_and_has_its_value_again():
    model = nn.Sequential(Clamps(4, 4), nn.Linear(4, 4))
    before = model[0].weight.detach().clone()
    with finding_written_parameters(model):
        model(torch.randn(2, 4))
        assert not torch.equal(model[0].weight, before)
    assert torch.equal(model[0].weight, before)
    assert written_parameters(model) == {"0.weight": model[0].weight}
    with restored(model):
        model(torch.randn(2, 4))
    assert torch.equal(model[0].weight, before)


def test_also_after_an_error():
    model = Clamps(4, 4)
    before = model.weight.detach().clone()
    with pytest.raises(RuntimeError), finding_written_parameters(model):
        model(torch.randn(2, 3))
    assert torch.equal(model.weight, before)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", [Clamps, ClampsData, AssignsData])
def test_a_prepared_model_is_left_as_it_was_and_its_simulation_is_calibrated(kind):
    torch.manual_seed(0)
    model, x = nn.Sequential(kind(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval(), torch.randn(8, 4)
    before, memory = model[0].weight.detach().clone(), model[0].weight.data_ptr()
    prepared = qtk.prepare_model(model, x)
    sim = qtk.QuantSim(model, x, config="onnxruntime")
    sim.compute_encodings([x], progress=False)
    assert torch.equal(model[0].weight, before)
    assert model[0].weight.data_ptr() == memory
    torch.testing.assert_close(prepared(x), model(x))
    assert (sim.model(x) - model(x)).abs().max() < 0.05
