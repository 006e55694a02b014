"""Slices of values that ops or outputs read, sampled, and what becomes of them in a calibration."""

import pytest
import torch
from torch import nn

import qtk
from qtk.calibration.slices import MOST_SLICES, SliceSamples
from qtk.calibration.uneven_channels import FEWEST_VALUES
from qtk.numerics.error import sqnr_db

BOXES = 500.0


class Head(nn.Module):
    """One layer makes four large numbers and two small ones."""

    def __init__(self, read, of=nn.Linear):
        super().__init__()
        torch.manual_seed(0)
        self.read = read
        self.layer, self.head = (nn.Linear(16, width) if of is nn.Linear else of(16, width, 1) for width in (16, 6))
        with torch.no_grad():
            self.head.weight[:4] *= BOXES

    def forward(self, x):
        return self.read(self.head(self.layer(x).relu()))


def inputs(seed, shape=(64, 16)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


READS = {
    "slices": lambda y: (y[:, :4], y[:, 4:]),
    "activated": lambda y: (y[:, :4], y[:, 4:].sigmoid()),
    "variance": lambda y: (y[:, :4], (y[:, 4:] * 0.5).exp()),
    "split": lambda y: y.split([4, 2], 1),
    "joined again": lambda y: torch.cat([y[:, :4], y[:, 4:].sigmoid()], 1).split([4, 2], 1),
    "sliced by the caller": lambda y: y,
}


def outputs(model, x):
    y = model(x)
    return [each.detach() for each in (y if isinstance(y, (tuple, list)) else (y[:, :4], y[:, 4:]))]


@pytest.mark.parametrize("config", ["default", "onnxruntime"])
@pytest.mark.parametrize("read", READS)
def test_numbers_of_one_layer_keep_their_digits(read, config):
    model = Head(READS[read]).eval()
    sim = qtk.QuantSim(model, inputs(0), config=config)
    sim.compute_encodings([inputs(seed) for seed in range(4)], progress=False)
    for expected, got in zip(outputs(model, inputs(0)), outputs(sim.model, inputs(0)), strict=True):
        assert sqnr_db(expected, got) > 30


def test_channels_of_a_convolution():
    model, x = Head(lambda y: y, nn.Conv2d).eval(), inputs(0, (2, 16, 8, 8))
    sim = qtk.QuantSim(model, x, config="onnxruntime")
    sim.compute_encodings([x], progress=False)
    assert "head:out" not in sim.quantizers
    assert sqnr_db(model(x)[:, 4:].detach(), sim.model(x)[:, 4:].detach()) > 30


@pytest.mark.parametrize("model", [
    nn.Sequential(nn.Linear(16, 6)), nn.Sequential(nn.Linear(16, 16), nn.ReLU()), Head(lambda y: (y[:, :3], y[:, 1:4])),
])
def test_what_is_alike_keeps_its_codes(model):
    sim = qtk.QuantSim(model.eval(), inputs(0), config="onnxruntime")
    sim.compute_encodings([inputs(0)], progress=False)
    assert [name for name in sim.quantizers if name.endswith(":out")] == [
        name for name in qtk.QuantSim(model, inputs(0), config="onnxruntime").quantizers if name.endswith(":out")]


def kept(read, batches):
    sim = qtk.QuantSim(Head(read).eval(), inputs(0))
    samples = SliceSamples(sim.simulation, sim.simulation.quantizers)
    (site,) = (site for site in sim.simulation.plan if site.name == "head:out")
    for batch in batches:
        samples.keep(site, batch)
    return samples.values.get(site, {})


def test_values_of_each_slice():
    y = torch.arange(12.0).reshape(2, 6)
    values = kept(lambda y: (y[:, :4].exp(), y[:, 4:].sigmoid()), [y, -y])
    assert {name: each.tolist() for name, each in values.items()} == {
        "exp:in[0]": [*y[:, :4].flatten().tolist(), *(-y[:, :4]).flatten().tolist()],
        "sigmoid:in[0]": [*y[:, 4:].flatten().tolist(), *(-y[:, 4:]).flatten().tolist()],
    }


def test_values_of_another_shape_are_left_out():
    assert kept(lambda y: (y[:, :4].exp(), y[:, 4:]), [torch.rand(2, 6)]).keys() == {"exp:in[0]", "slice_1:out"}
    assert not kept(lambda y: (y[:, :4].exp(), y[:, 4:]), [torch.rand(12)])


def test_steps_of_a_loop_are_no_slices_of_their_own():
    def steps(count):
        return lambda y: [y[:, i % 6].exp() for i in range(count)] + [y.sum(1)]

    assert len(kept(steps(MOST_SLICES), [torch.rand(2, 6)])) == MOST_SLICES
    assert not kept(steps(MOST_SLICES + 1), [torch.rand(2, 6)])


def test_a_range_of_few_values_says_nothing():
    few, many = torch.rand(FEWEST_VALUES - 1, 6), torch.rand(FEWEST_VALUES, 6)
    many[:, 2] = 0.0
    assert not kept(lambda y: y, [few])
    assert [each.tolist() for each in kept(lambda y: y, [many]).values()] == [
        [pytest.approx(float(many.amax(0)[many.amax(0) > 0].min()))]]
