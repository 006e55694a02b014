import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qtk
from qtk.channels.channel_scales import ChannelScales
from qtk.graph.flow import Flow
from qtk.transforms.input_statistics import Sampling
from qtk.transforms.named_tensors import NamedTensors
from qtk.transforms.quantized_products import input_plan, multiplications, product, sampling

WIDTH = 6


class Op(nn.Module):
    """One product of a sigmoid and a weight."""

    def __init__(self, weight, how):
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.how = nn.Parameter(torch.randn(weight)), how
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return self.how(torch.sigmoid(x), self.weight, self.bias)


OPS = {
    "linear": ((4, WIDTH), (2, 3, WIDTH), F.linear, Sampling.ROWS, 0),
    "matmul": ((WIDTH, 4), (2, 3, WIDTH), lambda x, w, b: x @ w, Sampling.ROWS, 1),
    "transposed": ((4, WIDTH), (2, 3, WIDTH), lambda x, w, b: x @ w.t(), Sampling.ROWS, 0),
    "addmm": ((WIDTH, 4), (5, WIDTH), lambda x, w, b: torch.addmm(b, x, w), Sampling.ROWS, 1),
    "left factor": ((4, WIDTH), (2, WIDTH, 3), lambda x, w, b: w @ x, Sampling.WHOLE, 0),
    "batched": ((2, WIDTH, 4), (2, 3, WIDTH), lambda x, w, b: torch.bmm(x, w), Sampling.WHOLE, (0, 2)),
    "conv": ((4, 3, 3, 3), (2, WIDTH, 5, 5), lambda x, w, b: F.conv2d(x, w, b, groups=2), Sampling.MAPS, 0),
    "unbatched conv": ((4, WIDTH, 3), (WIDTH, 5), F.conv1d, Sampling.WHOLE, 0),
    "conv_transpose": ((WIDTH, 4, 2), (2, WIDTH, 5), lambda x, w, b: F.conv_transpose1d(x, w, b, stride=2),
                       Sampling.MAPS, 1),
}


def read(name):
    weight, shape, how, *rest = OPS[name]
    model, x = Op(weight, how).eval(), torch.randn(shape)
    prepared = qtk.prepare_model(model, x, dynamic_shapes=None)
    sim = qtk.QuantSim(prepared, x)
    (item,) = ChannelScales(prepared, (x,), {}).inputs
    return item, NamedTensors(prepared).tensor(item.weight), Flow(prepared.graph), sim.plan, how, x, rest


def rounded(weight, axis):
    """Symmetric int8 with a scale for each index of ``axis``, or of several axes, written out."""
    others = [other for other in range(weight.ndim) if other not in (axis if isinstance(axis, tuple) else (axis,))]
    scale = torch.maximum(weight.amax(others, keepdim=True) / 127, weight.amin(others, keepdim=True) / -128)
    return (weight / scale).round().clamp(-128, 127) * scale


@pytest.mark.medium
@pytest.mark.parametrize("name", OPS)
def test_products_are_those_of_the_op(name):
    item, weight, flow, plan, how, x, (kind, axis) = read(name)
    factor = product(item, weight, flow, plan)
    bias = item.graph.get_parameter("bias") if "bias" in dict(item.graph.named_parameters()) else torch.zeros(4)
    other = torch.randn_like(weight)
    with torch.no_grad():
        assert torch.allclose(factor.exact(x, other), how(x, other, bias), atol=1e-6)
        assert torch.allclose(factor.rounded(x, other), how(x, rounded(other, axis), bias), atol=1e-5)
    assert sampling(item, weight) is kind


@pytest.mark.medium
@pytest.mark.parametrize("name", OPS)
def test_scaling_input_and_weight_by_the_index_keeps_the_product(name):
    item, weight, flow, plan, _, x, _ = read(name)
    factor = product(item, weight, flow, plan)
    scale = torch.rand(x.shape[item.channel_axis]) + 0.5
    shape = [-1 if axis == item.channel_axis % x.ndim else 1 for axis in range(x.ndim)]
    changed = factor.exact(x / scale.reshape(shape), weight.detach() * scale[factor.channel])
    assert torch.allclose(changed, factor.exact(x, weight.detach()), atol=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("name", "expected"),
    [("linear", 4), ("matmul", 4), ("left factor", 4), ("conv", 4 * 9 * 3 * 9 / (WIDTH * 25)), ("conv_transpose", 8)],
)
def test_multiplications_for_each_element(name, expected):
    item, weight, flow, plan, _, x, _ = read(name)
    assert multiplications(item, product(item, weight, flow, plan), x) == pytest.approx(expected)


def test_an_edge_with_its_own_spec_decides():
    config = {"version": 1, "extends": "default", "rules": [{"match": {"op": "linear"}, "input": {"bits": 4}}]}
    x = torch.randn(2, WIDTH)
    prepared = qtk.prepare_model(Op((4, WIDTH), F.linear).eval(), x)
    sim = qtk.QuantSim(prepared, x, config=config)
    (item,) = ChannelScales(prepared, (x,), {}).inputs
    assert input_plan(item, Flow(prepared.graph), sim.plan).spec.dtype.bits == 4


def test_an_added_activation_counts_as_zero():
    class Added(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

        def forward(self, x):
            return torch.addmm(x, torch.sigmoid(x), self.weight)

    x = torch.randn(5, WIDTH)
    prepared = qtk.prepare_model(Added().eval(), x)
    sim = qtk.QuantSim(prepared, x)
    (item,) = ChannelScales(prepared, (x,), {}).inputs
    weight = prepared.get_parameter("weight").detach()
    factor = product(item, NamedTensors(prepared).tensor("weight"), Flow(prepared.graph), sim.plan)
    rows = torch.randn(3, WIDTH)
    assert torch.allclose(factor.exact(rows, weight), rows @ weight, atol=1e-6)
