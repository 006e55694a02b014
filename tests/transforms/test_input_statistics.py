import pytest
import torch
from torch import nn

import qtk
from qtk.errors import CalibrationError
from qtk.graph.captured_graph import CapturedGraph
from qtk.graph.graphs import graphs
from qtk.graph.sites import value_site
from qtk.transforms.input_statistics import NUM_ROWS, InputStatistics, Sampling, TappedValue, gathering


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.act, self.fc = nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Linear(3, 4)

    def forward(self, x):
        return self.fc(self.act(self.conv(x)).mean((2, 3)))


class Branching(nn.Module):
    """Stays Python: it looks at its numbers."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, x):
        return self.fc(x) if float(x.detach().sum()) > 1e9 else self.fc(-x)


def model_and_values():
    torch.manual_seed(0)
    model = qtk.prepare_model(Net().eval(), torch.randn(4, 2, 6, 6))
    by_site = {value_site(node).name: node for node in model.graph.nodes if node.op != "output"}
    values = [TappedValue(model, by_site["x:input"], 1, Sampling.MAPS),
              TappedValue(model, by_site["mean:out"], -1, Sampling.ROWS, keeps_rows=True)]
    return model, values


def pooled(model, x):
    weight, bias = model.get_parameter("conv.weight").detach(), model.get_parameter("conv.bias").detach()
    return torch.conv2d(x, weight, bias).relu().mean((2, 3))


def gathered(model, values, batches):
    with gathering(model, values) as statistics, torch.no_grad():
        for batch in batches:
            model(batch)
    return statistics


def test_ranges_and_samples_are_of_different_batches():
    model, values = model_and_values()
    batches = list(torch.randn(6, 4, 2, 6, 6).unbind())
    images, features = gathered(model, values, batches)
    held_out, used = [batches[1], batches[5]], torch.cat([batches[0], *batches[2:5]])
    assert torch.equal(images.range[0], used.amin((0, 2, 3)))
    assert torch.equal(images.range[1], used.amax((0, 2, 3)))
    assert torch.equal(images.samples[0], torch.cat(held_out))
    assert torch.allclose(features.samples[0], torch.cat([pooled(model, x) for x in held_out]), atol=1e-6)
    rows = torch.cat(features.rows).sort(0).values
    assert torch.allclose(rows, pooled(model, used).sort(0).values, atol=1e-6)
    assert images.is_held_out
    assert features.is_complete


def test_a_single_batch_is_divided():
    model, values = model_and_values()
    batch = torch.randn(8, 2, 6, 6)
    images, features = gathered(model, values, [batch])
    assert torch.equal(images.range[1], batch[:6].amax((0, 2, 3)))
    assert torch.equal(images.samples[0], batch[6:])
    assert features.samples[0].shape == (2, 3)
    assert images.is_held_out


def test_a_single_sample_serves_for_both_and_says_so():
    model, values = model_and_values()
    batch = torch.randn(1, 2, 6, 6)
    images, _ = gathered(model, values, [batch])
    assert torch.equal(images.range[1], batch.amax((0, 2, 3)))
    assert torch.equal(images.samples[0], batch)
    assert not images.is_held_out


@pytest.mark.parametrize("padded", [slice(6, None), slice(0, 6)])
def test_a_batch_of_which_one_part_is_padding_is_not_divided(padded):
    _, (images, _) = model_and_values()
    statistics, batch, counted = InputStatistics(images), torch.randn(8, 2, 6, 6), torch.ones(8, 2, 6, 6).bool()
    counted[padded] = False
    batch[padded] = 0.0
    statistics.observe(batch, 0, counted)
    assert statistics.is_complete
    assert torch.equal(statistics.range[1], batch[counted[:, 0, 0, 0]].amax((0, 2, 3)))
    assert torch.equal(statistics.samples[0], batch)
    assert not statistics.is_held_out


def test_the_model_is_left_as_it_was():
    model, values = model_and_values()
    code, modules = model.code, [name for name, _ in model.named_modules()]
    with pytest.raises(ZeroDivisionError), gathering(model, values):
        raise ZeroDivisionError
    assert (model.code, [name for name, _ in model.named_modules()]) == (code, modules)
    assert not model._forward_pre_hooks


@pytest.mark.sample(3)
@pytest.mark.medium
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_number_that_is_none_is_an_error_naming_the_site(number, place):
    model, values = model_and_values()
    batches = torch.randn(3, 4, 2, 6, 6)
    batches[place, 3, 1, 2, 2] = number
    with pytest.raises(CalibrationError, match=r"x:input: NaN or infinity"):
        gathered(model, values, batches)


def test_the_number_of_rows_is_bounded_and_they_are_evenly_spread():
    value = model_and_values()[1][1]
    statistics = InputStatistics(value)
    statistics.observe(torch.zeros(4, 3), 0)
    statistics.observe(torch.arange(5 * NUM_ROWS).float()[:, None].expand(-1, 3), 1)
    rows = statistics.samples[0]
    assert NUM_ROWS / 2 <= len(rows) <= NUM_ROWS
    assert rows[:, 0].diff().unique().numel() == 1


@pytest.mark.medium
def test_a_value_that_no_data_reach_is_incomplete():
    model, values = model_and_values()
    assert not gathered(model, values, [])[0].is_complete


def test_a_value_reached_only_by_statistics_serves_for_both():
    value = model_and_values()[1][1]
    statistics = InputStatistics(value)
    statistics.observe(torch.ones(4, 3), 2)
    assert not statistics.is_complete  # no sample: nothing to measure on


def test_empty_batches_are_passed_over():
    value = model_and_values()[1][1]
    statistics = InputStatistics(value)
    statistics.observe(torch.ones(0, 3), 0)
    statistics.observe(torch.ones(4, 3), 1)
    assert not statistics.is_complete


@pytest.mark.medium
def test_graphs_inside_a_model_that_stays_python():
    torch.manual_seed(0)
    model = qtk.prepare_model(Branching().eval(), torch.randn(4, 8))
    assert not isinstance(model, CapturedGraph)
    values = [
        TappedValue(graph, node, -1, Sampling.ROWS)
        for graph in graphs(model).values() for node in graph.graph.find_nodes(op="placeholder")
    ]
    batches = torch.randn(2, 8, 8)
    (statistics,) = gathered(model, values, batches)
    assert torch.equal(statistics.range[1], -batches[0].amin(0))
    assert torch.equal(statistics.samples[0], -batches[1])
