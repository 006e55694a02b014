"""Which ops of a graph compute a loss."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import qtk
from qtk.graph.losses import loss_nodes

X, LABELS, TARGET = torch.randn(6, 4), torch.randint(3, (6,)), torch.randn(6, 3)


class Model(nn.Module):
    def __init__(self, loss, *, returns=True):
        super().__init__()
        self.body, self.loss, self.returns = nn.Linear(4, 3), loss, returns

    def forward(self, x, target):
        y = self.body(x)
        loss = self.loss(y, target)
        return (loss, y) if self.returns else loss


def smooth(y, labels):
    return F.cross_entropy(y, labels, label_smoothing=0.1)


def by_hand(y, labels):
    return -y.log_softmax(-1).gather(1, labels[:, None]).mean()


def squared(y, target):
    return ((y - target) ** 2).sum(-1).sqrt().mean() * 0.5


@pytest.mark.medium
@pytest.mark.sample(4)
@pytest.mark.parametrize("returns", [True, False])
@pytest.mark.parametrize(("loss", "target"), [
    (F.cross_entropy, LABELS), (smooth, LABELS), (by_hand, LABELS), (F.mse_loss, TARGET), (squared, TARGET),
], ids=lambda value: getattr(value, "__name__", ""))
def test_a_loss_and_its_target_stay_in_float(loss, target, returns):
    sim = qtk.QuantSim(Model(loss, returns=returns), (X, target))
    assert list(sim.quantizers) == ["x:input", "body.weight", "body:out"]
    sim.compute_encodings([(X, target)], progress=False)
    output = sim.model(X, target)
    if returns:
        assert torch.equal(output[0], loss(output[1], target))
    else:
        assert "of a loss" in sim.plan.unquantized.values()


class Scalar(nn.Module):
    """Returns a scalar that is no loss, for nothing is read by it alone."""

    def forward(self, x, y):
        return (x @ y).relu().sum()


class Temperature(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 3)

    def forward(self, x, temperature):
        y = self.body(x) / temperature
        return y, y.mean()


@pytest.mark.medium
@pytest.mark.parametrize(("model", "inputs"), [
    (Scalar(), (X, torch.randn(4, 3))), (Temperature(), (X, torch.tensor(2.0))),
    (nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)), (X[:1],)),
])
def test_what_is_no_loss(model, inputs):
    assert loss_nodes(qtk.prepare_model(model, inputs).graph) == set()
