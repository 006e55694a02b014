"""What calibration data show: the number that is enough, batches that stand out, silent channels, experts."""

import pytest
import torch
from torch import nn

import qtk
from qtk.errors import CalibrationError
from qtk.report.data_report import CalibrationSize
from qtk.workflow.data_report import recommended


def batches(count=12, seed=0):
    return list(torch.randn(count, 16, 8, generator=torch.Generator().manual_seed(seed)))


def net():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    with torch.no_grad():
        model[0].weight[3], model[0].bias[3] = 0.0, -1.0  # a channel that is never active
    return model


@pytest.mark.sample(2)
@pytest.mark.medium
@pytest.mark.parametrize("odd", ["× 20", "/ 20", "+ 3", "zeros", "one sample"])
def test_a_planted_batch_is_named_and_no_other(odd):
    data = batches()
    changed = {"× 20": 20 * data[5], "/ 20": data[5] / 20, "+ 3": data[5] + 3, "zeros": torch.zeros(16, 8),
               "one sample": data[5][:1].expand(16, 8)}
    sim = qtk.QuantSim(net(), data[0])
    clean = sim.data_report(data, progress=False)
    assert clean.odd == ()
    data[5] = changed[odd]
    found = sim.data_report(data, progress=False)
    assert [each.index for each in found.odd] == [5]


@pytest.mark.medium
def test_it_leaves_the_simulation_as_it_was_and_names_silent_channels():
    data = batches()
    sim = qtk.QuantSim(net(), data[0], scheme="mse")
    sim.compute_encodings(data[:2], progress=False)
    before = {name: each.scale.clone() for name, each in sim.encodings().items()}
    report = sim.data_report(data, progress=False)
    assert {name: torch.equal(before[name], each.scale) for name, each in sim.encodings().items()} == dict.fromkeys(
        before, True)
    assert report.silent == {"1:out": (3,)}
    assert [each.batches for each in report.sizes] == [1, 2, 4, 8, 9]
    assert report.sizes[-1].changed == 0.0
    assert report.sizes[0].range_share < report.sizes[-1].range_share == 1.0
    again = qtk.QuantSim(net(), data[0], scheme="mse")
    again.compute_encodings(data[:2], progress=False)
    judged = torch.cat(data[9:])
    with torch.no_grad():
        expected, found = net()(judged), again.model(judged)
    sqnr = float(10 * torch.log10(expected.square().sum() / (expected - found).square().sum()))
    assert report.sizes[1].sqnr_db == pytest.approx(sqnr, abs=0.01)


class Time(nn.Module):
    """A channel of a convolution over time [N, C, T] that is never active, and steps that never are."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv1d(8, 5, 1), nn.Conv1d(5, 2, 1)

    def forward(self, x):
        return self.head(self.conv(x).relu())


@pytest.mark.medium
def test_silent_channels_are_counted_along_the_axis_that_the_reader_sums_over():
    torch.manual_seed(0)
    model = Time().eval()
    with torch.no_grad():
        model.conv.weight[2], model.conv.bias[2] = 0.0, -1.0
    data = [each.unflatten(1, (8, 1)).expand(-1, -1, 6) for each in batches()]
    report = qtk.QuantSim(model, data[0]).data_report(data, progress=False)
    assert report.silent == {"relu:out": (2,)}


@pytest.mark.medium
def test_channels_of_valid_tokens_alone_are_silent():
    torch.manual_seed(0)

    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 6), nn.Linear(6, 2)

        def forward(self, x, mask):
            return self.second(self.first(x).relu())

    model = Tokens().eval()
    with torch.no_grad():
        model.first.weight[4], model.first.bias[4] = torch.eye(8)[0], -50.0  # active where the padding is
    mask = torch.ones(4, 5, dtype=torch.bool)
    mask[:, 3:] = False
    data = [(torch.randn(4, 5, 8).masked_fill(~mask[..., None], 1000.0), mask) for _ in range(5)]
    sim = qtk.QuantSim(model, data[0])
    assert sim.data_report(data, valid="mask", progress=False).silent == {"relu:out": (4,)}
    assert sim.data_report(data, progress=False).silent == {}


@pytest.mark.parametrize(("changed", "wanted"), [
    ((0.1, 0.0, 0.0), 2), ((0.0, 0.0, 0.0), 1), ((0.0, 0.1, 0.0), None), ((0.1, 0.1, 0.0), None), ((0.0,), None),
])
def test_the_recommended_number_is_the_first_from_which_nothing_changes(changed, wanted):
    sizes = [CalibrationSize(1 << index, 1, 1.0, 30.0, each) for index, each in enumerate(changed)]
    assert recommended(sizes, 100) == wanted
    assert recommended(sizes, 10) == (1 if len(sizes) > 1 else None)  # a change of one prediction is none


def test_without_predictions_the_error_decides():
    sizes = [CalibrationSize(count, 1, 1.0, db, None) for count, db in ((1, 20.0), (2, 29.8), (4, 30.0))]
    assert recommended(sizes, 0) == 2


def test_one_batch_judges_nothing():
    with pytest.raises(CalibrationError, match="at least 2 batches are needed, got 1: the last ones judge"):
        qtk.QuantSim(net(), batches()[0]).data_report(batches(1), progress=False)
