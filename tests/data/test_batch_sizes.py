"""Sizes that differ between batches are freed when a model is captured for them."""

import pytest
import torch
from torch import nn

import qtk
from qtk.data.batch_sizes import differing_axes, example_of


def test_axes_are_found_in_nested_batches():
    def batch(samples, length):
        return {"ids": torch.zeros(samples, length), "image": torch.zeros(samples, 3, 8, length)}

    assert differing_axes([batch(2, 5), batch(3, 5)]) == set()
    assert differing_axes([batch(2, 5), batch(2, 6), batch(1, 5)]) == {(0, 1), (1, 3)}


def test_batches_of_other_kinds_are_not_compared():
    assert differing_axes([torch.zeros(2, 5), torch.zeros(2, 3, 5), [torch.zeros(2, 4), torch.zeros(2, 4)]]) == set()


def test_the_example_has_no_size_of_one_that_differs():
    batches = [torch.zeros(4, 1), torch.zeros(4, 3), torch.zeros(4, 5)]
    assert example_of(batches) == (batches[1], "all")
    assert example_of(batches[:1]) == (batches[0], "batch")


class Sentences(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.cell, self.head = nn.Embedding(20, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, ids):
        return self.head(self.cell(self.embed(ids))[0].mean(1))


class Lines(nn.Module):
    """A reader of text lines: convolutions, then a recurrent net along the width."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.cell, self.head = nn.LSTM(4 * 4, 8, batch_first=True, bidirectional=True), nn.Linear(16, 5)

    def forward(self, image):
        x = self.conv(image)
        return self.head(self.cell(x.permute(0, 3, 1, 2).flatten(2))[0]).log_softmax(-1)


@pytest.mark.medium
@pytest.mark.parametrize("kind", ["sentences", pytest.param("lines", marks=pytest.mark.slow)])
def test_batches_of_any_length_are_quantized_at_the_first_try(kind):
    torch.manual_seed(0)
    if kind == "sentences":
        net, data = Sentences().eval(), [torch.randint(20, (4, length)) for length in (7, 5, 9, 3, 6)]
    else:
        net, data = Lines().eval(), [torch.rand(2, 1, 8, width) for width in (40, 24, 32, 16)]
    sim, account = qtk.quantize(net, [(each, torch.zeros(len(each))) for each in data], max_drop=0.05, progress=False)
    assert account.reached
    other = data[0][:, ..., :-2]
    with torch.no_grad():
        expected, found = net(other), sim.model(other)
    assert float((expected - found).square().sum() / expected.square().sum()) < 0.05
