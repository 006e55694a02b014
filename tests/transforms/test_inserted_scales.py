import pytest
import torch
from torch import nn

import qtk
from qtk.channels.channel_scales import ChannelScales
from qtk.graph.flow import Flow
from qtk.transforms.channel_scale_step import InsertChannelScale
from qtk.transforms.inserted_scales import LEAST_WORK, inserting_steps, reason_against
from qtk.transforms.named_tensors import NamedTensors
from qtk.transforms.quantized_products import input_plan
from qtk.transforms.steps import make


class Reads(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.first, self.a, self.b, self.how = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), how

    def forward(self, x):
        return self.how(self, x)


def reason(how, *, layer="a", work=LEAST_WORK, **settings):
    torch.manual_seed(0)
    x = torch.randn(4, 6, 8)
    model = qtk.prepare_model(Reads(how).eval(), x)
    plan = qtk.QuantSim(model, x, **settings).plan
    items = [item for item in ChannelScales(model, (x,), {}).inputs if item.weight == f"{layer}.weight"][:1]
    weights = [NamedTensors(model).tensor(item.weight) for item in items]
    flow = Flow(items[0].graph.graph)
    return reason_against(model, items, weights, input_plan(items[0], flow, plan), work, flow)


def gelu(m, x):
    return torch.nn.functional.gelu(m.first(x))


@pytest.mark.medium
@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("how", "message"),
    [
        (lambda m, x: m.a(gelu(m, x)), None),
        (lambda m, x: m.a(gelu(m, x)) + m.b(gelu(m, x)), None),
        (lambda m, x: m.a(gelu(m, x)) + gelu(m, x), None),
        (lambda m, x: m.a(x), "it is a model input"),
        (lambda m, x: m.a(torch.cat([gelu(m, x), torch.sigmoid(x)], 1)), "it shares its encoding with the values it"),
        (lambda m, x: m.a(m.a(gelu(m, x)).sigmoid()), "its weight is read elsewhere too"),
        (lambda m, x: m.a(gelu(m, x)) @ m.a.weight.t(), "its weight is read elsewhere too"),
    ],
)
def test_where_a_multiplication_may_stand(how, message):
    found = reason(how)
    assert found == message or found.startswith(message)


def test_a_moved_value_with_other_readers_would_be_rounded_before():
    def how(m, x):
        h = gelu(m, x)
        return m.a(h.flip(1)) + h

    assert reason(how).startswith("the layers read it behind data movement, and others read")


@pytest.mark.medium
def test_little_work_and_values_in_float():
    assert reason(lambda m, x: m.a(gelu(m, x)), work=LEAST_WORK - 1).startswith("its layers make 31 multiplications")
    assert reason(lambda m, x: m.a(gelu(m, x)), activation_bits=None) == "it is not quantized"


def test_names_are_free_and_slices_of_one_weight_are_scaled_once():
    torch.manual_seed(0)
    x = torch.randn(4, 6, 8)

    class Packed(Reads):
        def __init__(self):
            super().__init__(None)
            self.a.register_buffer("smooth_scale", torch.zeros(1))

        def forward(self, x):
            h = gelu(self, x)
            top, bottom = self.a.weight.chunk(2)
            return torch.cat([h @ top.t(), h @ bottom.t()], -1) + self.a.smooth_scale

    model = qtk.prepare_model(Packed().eval(), x)
    before = model(x)
    items = [item for item in ChannelScales(model, (x,), {}).inputs if item.weight == "a.weight"]
    assert len(items) == 2
    scale = torch.rand(8, dtype=torch.float64) + 0.5
    steps = inserting_steps(model, items, scale)
    (insertion,) = [step for step in steps if isinstance(step, InsertChannelScale)]
    assert insertion.scale not in dict(model.named_buffers())
    make(model, steps)
    assert torch.allclose(model(x), before, atol=1e-5)
