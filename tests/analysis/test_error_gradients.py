import pytest
import torch
from torch import nn

import qtk
from qtk.analysis.error_gradients import ErrorGradients
from qtk.quantizers.modes import in_mode


class Net(nn.Module):
    """An embedding whose error reaches a sum, a weight used twice, and an activation."""

    def __init__(self):
        super().__init__()
        self.words, self.fc, self.head = nn.Embedding(9, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, tokens):
        x = self.words(tokens).mean(1)
        return self.head(self.fc(self.fc(x).tanh()).tanh())


def test_products_are_directional_derivatives_of_each_sample():
    torch.manual_seed(0)
    net, tokens = Net().eval().double().float(), torch.randint(0, 9, (4, 5))
    sim = qtk.QuantSim(net, tokens)
    sim.compute_encodings([tokens], progress=False)
    gradients = ErrorGradients(sim.quantizers.values())
    with in_mode(sim.quantizers.values(), qtk.Mode.BYPASS), gradients.listening(sim.model):
        output = sim.model(tokens)
    signs = torch.randn_like(output)
    gradients.count_samples([output])
    products = gradients.products([output], [signs])
    assert set(products) == set(sim.quantizers.values())
    for name, quantizer in sim.quantizers.items():
        with in_mode(sim.quantizers.values(), qtk.Mode.BYPASS), torch.no_grad():
            reference = sim.model(tokens).double()
            with in_mode([quantizer], qtk.Mode.SIMULATE):
                moved = sim.model(tokens).double()
        wanted = (signs * (moved - reference)).sum(1)  # to first order, of a small error
        samples, rest = products[quantizer]
        assert float(rest) == 0.0, name
        assert torch.allclose(torch.as_tensor(samples).double(), wanted, atol=0.05 * float(wanted.abs().max())), name


def test_nothing_stays_behind(monkeypatch):
    net, tokens = Net().eval(), torch.randint(0, 9, (4, 5))
    sim = qtk.QuantSim(net, tokens)
    sim.compute_encodings([tokens], progress=False)
    gradients = ErrorGradients(sim.quantizers.values())
    with pytest.raises(ZeroDivisionError), gradients.listening(sim.model):
        raise ZeroDivisionError
    assert all(parameter.requires_grad for parameter in sim.model.parameters())
    assert not any(quantizer._forward_hooks for quantizer in sim.quantizers.values())
