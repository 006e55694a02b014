"""The axis of channels, against the axis along which a silent channel is planted."""

import pytest
import torch
from torch import nn

import qtk
from qtk.graph.channel_axis import channel_axis
from qtk.graph.flow import Flow
from qtk.graph.graphs import graphs
from qtk.graph.insert import quantizer_called


class Sequence(nn.Module):
    """Convolutions over time, then layers over the channels behind a transposition: [N, C, T] and [N, T, C]."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv1d(3, 6, 3, padding=1), nn.Linear(6, 4)

    def forward(self, x):
        return self.head(self.conv(x).relu().transpose(1, 2))


class Products(nn.Module):
    """A weight on the left, whose product sums over the second last axis; and a sum on the way."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 5))

    def forward(self, x):
        return torch.matmul(self.weight, (x.relu() + x).tanh())


class ChannelsLast(nn.Module):
    """Images [N, H, W, C] through layers, as in ConvNeXt and Swin."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(self.up(self.norm(x)).relu())


class Mixed(nn.Module):
    def forward(self, x):
        return x.relu().flatten(1).tanh().view(2, 3, 8)


def axes(model, x, **settings):
    sim = qtk.QuantSim(model.eval(), x, **settings)
    names = {quantizer: site.name for site, quantizer in sim.simulation.quantizers.items()}
    found = {}
    for graph in graphs(sim.model).values():
        flow = Flow(graph.graph)
        for node in graph.graph.nodes:
            quantizer = quantizer_called(node)
            if quantizer is not None and not sim.plan[next(s for s in sim.plan if s.name == names[quantizer])].static:
                found[names[quantizer]] = channel_axis(flow, node)
    return found


@pytest.mark.medium
@pytest.mark.parametrize(("model", "shape", "expected"), [
    (Sequence, (2, 3, 9), {"x:input": 1, "relu:out": 1, "head:out": 2}),
    (Products, (2, 5, 7), {"x:input": 1, "tanh:out": 1}),
    (ChannelsLast, (2, 5, 5, 4), {"x:input": 3, "norm:out": 3, "relu:out": 3, "down:out": 3}),
    (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 2)), (2, 3, 5, 5),
     {"input:input": 1, "1:out": 1, "3:out": 1}),
    (Mixed, (2, 4, 6), {"x:input": None, "relu:out": None, "tanh:out": None}),
])
def test_it_is_the_axis_that_readers_sum_over(model, shape, expected):
    found = axes(model(), torch.randn(*shape))
    assert {name: found[name] for name in expected} == expected


def test_a_batch_of_as_many_samples_as_channels_stays_free():
    model = qtk.prepare_model(nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)).eval(), torch.randn(6, 6))
    flow = Flow(model.graph)
    for node in model.graph.nodes:
        if isinstance(node.meta.get("val"), torch.Tensor):
            channel_axis(flow, node)
    assert model(torch.randn(9, 6)).shape == (9, 6)


def test_a_long_chain_ends_somewhere():
    class Chain(nn.Module):
        def forward(self, x):
            for _ in range(500):
                x = x.tanh()
            return x

    model = qtk.prepare_model(Chain().eval(), torch.randn(3, 6), verify=False)
    assert channel_axis(Flow(model.graph), next(iter(model.graph.nodes))) is None
