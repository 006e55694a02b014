"""After ``learn_ranges`` every parameter gets a gradient in a step: DistributedDataParallel refuses others."""

import pytest
import torch
from torch import nn

import qtk
from qtk.errors import CalibrationError


class Net(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.fc, self.out, self.run = nn.Linear(4, 4), nn.Linear(4, 4), run
        self.register_buffer("factors", torch.tensor([0.1, 0.2, -0.3, 0.4]))

    def forward(self, x):
        return self.out(self.run(self, self.fc(x)))


def normalized(net, x):
    with torch.no_grad():
        size = x.abs().amax(-1, keepdim=True) + 1
    return x / size


FORMS = {  # the sites that are not learned
    "literal": (lambda net, x: x * torch.tensor([0.1, 0.2, -0.3, 0.4]), set()),
    "buffer": (lambda net, x: x * net.factors, set()),
    "detached buffer": (lambda net, x: x * net.factors.detach(), {"factors"}),
    "without gradient": (normalized, {"abs:out"}),
    "comparison": (lambda net, x: x * (x.tanh() > 0.1).float(), {"tanh:out"}),
    "largest": (lambda net, x: x + x.tanh().argmax(-1, keepdim=True), {"tanh:out"}),
    "straight through": (lambda net, x: x + (x.tanh() - x).detach(), {"tanh:out", "sub:out"}),
    "branch": (lambda net, x: x.tanh() + x.tanh().detach(), {"tanh_1:out"}),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_learned_range_gets_a_gradient(form):
    run, without = FORMS[form]
    torch.manual_seed(0)
    x = torch.randn(8, 4)
    sim = qtk.QuantSim(Net(run).eval(), x)
    sim.compute_encodings([x], progress=False)
    learned = sim.learn_ranges()
    assert {*sim.quantizers} - {*learned} == without
    sim.model(x).square().sum().backward()
    assert [name for name, parameter in sim.model.named_parameters() if parameter.grad is None] == []


def test_ranges_of_recurrent_layers_are_learned():
    sim = qtk.QuantSim(nn.GRU(4, 4, batch_first=True).eval(), x := torch.randn(2, 3, 4))
    sim.compute_encodings([x], progress=False)
    learned = sim.learn_ranges()
    output, _ = sim.model(x)
    output.square().sum().backward()
    assert {*learned} == {name for name, quantizer in sim.quantizers.items() if not quantizer.spec.dynamic}
    assert [name for name, parameter in sim.model.named_parameters() if parameter.grad is None] == []


def test_a_site_that_no_gradient_reaches_is_named():
    sim = qtk.QuantSim(Net(FORMS["comparison"][0]).eval(), x := torch.randn(8, 4))
    sim.compute_encodings([x], progress=False)
    with pytest.raises(CalibrationError, match=r"tanh:out is of a value that no gradient reaches"):
        sim.learn_ranges("tanh:out")
