"""A clamp whose bounds are scaled channel by channel."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qtk
from qtk.calls.calls import Call
from qtk.core.site import Site
from qtk.graph.graphs import graphs
from qtk.nn.channel_clamp import ChannelClamp
from qtk.transforms.clamp_step import ScaleClamp, clamp_steps
from qtk.transforms.equalize import equalize_layers
from qtk.transforms.named_tensors import NamedTensors
from tests.transforms.equalization import NETS, equalized, images, unequal
from tests.transforms.scaling import Scaled, difference
from tests.transforms.scaling_nets import net


@pytest.mark.medium
def test_a_relu6_becomes_a_clamp_with_scaled_bounds() -> None:
    model = unequal(NETS["relu6"][0]())
    x = images(2, 6, 6) * 10
    before, after, _ = equalized(model, x)
    assert any(isinstance(module, ChannelClamp) for module in after.modules())
    factor = dict(after.named_parameters())["a.bias"] / dict(before.named_parameters())["a.bias"]
    buffers = dict(after.named_buffers())
    torch.testing.assert_close(buffers["act.upper"], 6 * factor)
    assert not bool(buffers["act.lower"].any())
    assert {"act.upper", "act.lower"} == after.state_dict().keys() - before.state_dict().keys()
    twice = copy.deepcopy(after)  # bounds are scaled again, not replaced
    with torch.no_grad():
        for parameter, factor in ((twice.get_parameter("a.weight"), 4.0), (twice.get_parameter("a.bias"), 4.0),
                                  (twice.get_parameter("b.weight"), 0.25)):
            parameter.mul_(factor)
        twice.get_buffer("act.upper").mul_(4.0)
    equalize_layers(twice, Call((x,), {}, None))
    assert difference(before, twice, (x,), {}) <= 1e-10


def test_the_bounds_of_channels_have_a_size_in_numbers():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU6(), nn.Conv2d(8, 4, 3)).eval()
    with torch.no_grad():
        model[0].weight[:2] *= 50
        model[2].weight[:, :2] /= 50
    weights = {"weight": {"granularity": "per_tensor"}}
    sim = qtk.QuantSim(model, torch.randn(4, 3, 8, 8), config={"version": 1, "extends": "default", "defaults": weights})
    assert qtk.equalize_model(sim).applied
    values = [node.meta["val"] for graph in graphs(sim.model).values() for node in graph.graph.nodes
              if node.op == "get_attr" and "val" in node.meta]
    assert len(values) == 6
    assert {type(length) for value in values for length in value.shape} == {int}


def scale_of(factor: torch.Tensor, **names: str | None) -> ScaleClamp:
    names = {"lower_name": "lower", "upper_name": "upper"} | names
    return ScaleClamp(Site("act", "", "out"), 1, -1.0, 6.0, factor=factor, like="weight", **names)


@pytest.mark.parametrize("channels", [1, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bounds_are_scaled_in_float64_and_rounded_once(dtype: torch.dtype, channels: int) -> None:
    factor = torch.rand(channels, dtype=torch.float64) + 0.1
    state = {"weight": torch.zeros(3, dtype=dtype)}
    scale_of(factor).update(state)
    assert torch.equal(state["lower"], (-factor).to(dtype))
    assert torch.equal(state["upper"], (6 * factor).to(dtype))
    before = state["upper"]
    scale_of(factor, lower_name=None).update(state)  # bounds that are there are scaled again
    assert torch.equal(state["upper"], (before.double() * factor).to(dtype))
    assert torch.equal(state["lower"], (-factor).to(dtype))


def steps_for(model: nn.Module, factor: float) -> list[ScaleClamp]:
    scaled = Scaled(model, images(2, 6, 6))
    factors = torch.where(scaled.scales.free, factor, 1.0).double()
    return list(clamp_steps(scaled.scales, factors, NamedTensors(scaled.model)))


@pytest.mark.medium
def test_a_clamp_has_a_step_whose_names_are_free() -> None:
    model = net(lambda m, x: m.b(m.act(m.a(x))), a=nn.Conv2d(2, 5, 1), b=nn.Conv2d(5, 2, 1), act=nn.ReLU6())
    model.act.register_buffer("upper", torch.ones(2))
    (step,) = steps_for(model, 2.0)
    assert (step.call.name, step.axis, step.lower, step.upper) == ("act:out", 1, 0.0, 6.0)
    assert (step.lower_name, step.upper_name) == ("act.lower", "act.upper_bound")
    assert step.factor.tolist() == [2.0] * 5
    assert steps_for(model, 1.0) == []


def test_a_clamp_without_a_bound_has_no_buffer_for_it() -> None:
    model = net(lambda m, x: m.b(m.a(x).clamp(max=1.0)), a=nn.Conv2d(2, 5, 1), b=nn.Conv2d(5, 2, 1))
    (step,) = steps_for(model, 2.0)
    assert (step.lower, step.lower_name, step.upper, step.upper_name) == (None, None, 1.0, "clamp.upper")
    state = {step.like: torch.zeros(5)}
    step.update(state)
    assert state.keys() == {step.like, "clamp.upper"}
    assert state["clamp.upper"].tolist() == [2.0] * 5


def test_a_pinned_clamp_has_no_step() -> None:
    assert steps_for(net(lambda m, x: F.relu6(m.a(x)), a=nn.Conv2d(2, 5, 1)), 2.0) == []
