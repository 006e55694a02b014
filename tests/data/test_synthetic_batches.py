"""Batches that are made: what they hold, and that they are named as such."""

import pytest
import torch
from torch import nn

import qtk
from qtk.errors import CalibrationError


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 4), nn.Linear(4, 2)

    def forward(self, ids, mask):
        return self.head(self.embed(ids) * mask[..., None])


def convolutions():
    """A net whose batch norms have seen images with other means and widths than noise."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6, momentum=None), nn.ReLU(), nn.Conv2d(6, 4, 3),
                        nn.BatchNorm2d(4, momentum=None))
    with torch.no_grad():
        net.train()(5 + 3 * torch.randn(256, 1, 8, 8))
    return net.eval()


@pytest.mark.medium
def test_they_have_the_statistics_that_batch_norms_hold():
    net = convolutions()
    (batch,) = qtk.synthetic_batches(net, torch.zeros(1, 1, 8, 8), num_batches=1, batch_size=32)
    with torch.no_grad():
        for x, norm in ((net[:1](batch), net[1]), (net[:4](batch), net[4])):
            assert torch.allclose(x.mean((0, 2, 3)), norm.running_mean, atol=0.2 * float(norm.running_var.sqrt().max()))
            assert torch.allclose(x.std((0, 2, 3)), norm.running_var.sqrt(), rtol=0.2)
    assert not batch.requires_grad
    assert all(parameter.grad is None for parameter in net.parameters())


def test_tokens_are_of_the_vocabulary_and_masks_stay():
    ids, mask = torch.full((1, 6), 3), torch.tensor([[1.0, 1, 1, 1, 0, 0]]).long()
    batches = qtk.synthetic_batches(Tokens().eval(), {"ids": ids, "mask": mask}, num_batches=3, batch_size=8)
    assert repr(batches) == "SyntheticBatches(3 batches from random tokens)"
    assert batches[0]["ids"].shape == (8, 6)
    assert len(torch.cat([each["ids"] for each in batches]).unique()) > 40
    assert torch.equal(batches[2]["mask"], mask.expand(8, 6))


class Segments(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.segments = nn.Embedding(900, 4), nn.Embedding(2, 4)

    def forward(self, ids, segments):
        return self.words(ids) + self.segments(segments)


def test_inputs_of_equal_values_have_the_vocabulary_of_their_own_embedding():
    (batch,) = qtk.synthetic_batches(Segments().eval(), (torch.zeros(1, 6).long(), torch.zeros(1, 6).long()),
                                     num_batches=1)
    assert batch[0].max() > 100
    assert batch[1].max() == 1


class Beside(nn.Module):
    """A batch norm that one of two inputs reaches."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(5, 4)

    def forward(self, x, y):
        return self.norm(x) + self.linear(y)


class Unused(nn.Module):
    """A batch norm that runs in training alone."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(x) if self.training else 2 * x


@pytest.mark.parametrize(("model", "example", "batch_size", "made_from"), [
    (nn.BatchNorm1d(4), torch.zeros(1, 4), 1, "the statistics of 1 batch norm"),
    (Beside(), (torch.zeros(1, 4), torch.zeros(1, 5)), 3, "the statistics of 1 batch norm"),
    (Unused(), torch.zeros(1, 4), 3, "normal noise"),
])
def test_one_sample_and_norms_that_some_inputs_do_not_reach(model, example, batch_size, made_from):
    made = qtk.synthetic_batches(model.eval(), example, num_batches=1, batch_size=batch_size, steps=2)
    tensors = [made[0]] if torch.is_tensor(made[0]) else made[0]
    assert all(each.isfinite().all() and not each.requires_grad for each in tensors)
    assert made.made_from == made_from


@pytest.mark.medium
def test_the_seed_decides_and_a_report_names_them():
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    made = [qtk.synthetic_batches(net, torch.zeros(2, 4), seed=seed) for seed in (0, 0, 1)]
    assert torch.equal(made[0][0], made[1][0])
    assert not torch.equal(made[0][0], made[2][0])
    sim = qtk.QuantSim(net, made[0][0])
    assert "synthetic data, normal noise: " in str(sim.data_report(made[0], progress=False))


@pytest.mark.parametrize(("settings", "match"), [
    ({"num_batches": 0}, "num_batches must be at least 1; got 0"),
    ({"model": nn.Flatten(), "example_inputs": torch.zeros(1, 3).long()}, "no input of the model is a tensor"),
])
def test_mistakes_are_named(settings, match):
    with pytest.raises(CalibrationError, match=match):
        qtk.synthetic_batches(**{"model": nn.Linear(3, 2), "example_inputs": torch.zeros(1, 3), **settings})
