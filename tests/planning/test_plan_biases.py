import pytest
import torch
from torch import nn
from torch.nn import functional as F

import qtk
from qtk.core.site import Site
from qtk.errors import ConfigError
from tests.planning.plans import by_name, plan_of

INT32 = {"version": 1, "defaults": {"weight": {"granularity": "per_channel"}, "bias": {"dtype": "int32"}}}


def biases(model, x, config=INT32, **widths):
    found = plan_of(model, x, config, **{"weight_bits": 8} | widths)
    return {name: tuple(map(str, d.factors)) for name, d in by_name(found).items() if d.factors}, {
        site.name: reason for site, reason in found.unquantized.items()
    }


class Layers(nn.Module):
    """Convolution, norm, linear layer on three axes, product with a parameter, attention, linear layer."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(3, 8, 3), nn.LayerNorm(8), nn.Linear(8, 8)
        self.w, self.b, self.out = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8)), nn.Linear(8, 4)

    def forward(self, x):
        x = self.norm(self.conv(x).flatten(2).transpose(1, 2))
        x = torch.addmm(self.b, self.fc(x).flatten(0, 1), self.w).reshape(x.shape)
        return self.out(F.scaled_dot_product_attention(x, x, x))


@pytest.mark.medium
def test_a_bias_has_the_scales_of_the_input_and_the_weight_of_its_op():
    found, floats = biases(Layers(), torch.randn(2, 3, 5, 5))
    assert found == {
        "conv.bias": ("x:input", "conv.weight"), "fc.bias": ("norm:out", "fc.weight"), "b": ("fc:out", "w"),
        "out.bias": ("attention.core.context:out", "out.weight"),
    }
    assert "layer_norm adds it to no products of integers" in floats["norm.bias"]


class Alone(nn.Module):
    """A layer whose input, weight and bias are configured."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        return self.fc(x)


@pytest.mark.medium
@pytest.mark.parametrize(("defaults", "widths"), [
    ({"activation": {"bits": 16}}, {"activation_bits": 16}),
    ({"activation": {"dynamic": True}}, {}),
    ({"activation": {"dtype": "fp8_e4m3"}}, {}),
    ({"weight": {"dtype": "fp8_e4m3"}}, {}),
    ({"weight": {"symmetric": False}}, {}),
    ({"weight": {"granularity": "per_block", "block_size": 4}}, {}),
    ({"weight": "float"}, {}),
    ({}, {"activation_bits": None}),
    ({}, {"weight_bits": None}),
])
def test_it_stays_float_where_no_integer_kernel_adds_it(defaults, widths):
    config = {"version": 1, "defaults": {"bias": {"dtype": "int32"}} | defaults}
    found, floats = biases(Alone(), torch.randn(2, 8), config, **{"weight_bits": 8} | widths)
    assert not found
    assert floats["fc.bias"] == "int32 by defaults, but linear adds it to no products of integers"


def test_one_scale_of_the_weight_makes_one_of_the_bias():
    config = {"version": 1, "defaults": {"bias": {"dtype": "int32"}, "weight": {"granularity": "per_tensor"}}}
    found = by_name(plan_of(Alone(), torch.randn(2, 8), config, weight_bits=8))
    assert str(found["fc.bias"].spec) == "int32 per_tensor symmetric"
    assert found["fc.bias"].source == "x:input × fc.weight"


def test_a_scaled_sum_stays_float():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.b = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))

        def forward(self, x):
            return torch.addmm(self.b, x, self.w, beta=2.0)

    assert not biases(Scaled(), torch.randn(2, 8))[0]


def test_a_bias_of_two_layers_has_a_scale_in_each():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
            self.b.bias = self.a.bias

        def forward(self, x):
            return self.b(self.a(x))

    found, _ = biases(Shared(), torch.randn(2, 8))
    assert found == {"a:in[2]": ("x:input", "a.weight"), "b:in[2]": ("a:out", "b.weight")}


def test_a_bias_whose_input_carries_a_mask_leaves_with_it():
    x = torch.randn(2, 8)
    sim = qtk.QuantSim(Alone(), x, config={**INT32, "version": 1})
    x[0, 0] = -1e31
    sim.compute_encodings([x], progress=False)
    reasons = sim.plan.unquantized
    assert "x:input is not quantized: carries a mask" in reasons[Site.parameter("fc.bias")]
    assert sim.model(torch.randn(2, 8)).isfinite().all()


@pytest.mark.medium
@pytest.mark.parametrize(("inside", "move"), [
    ("float", lambda y: y.transpose(0, 1)), ("float", lambda y: y[:, -1].reshape(2, 2, 4)),
    pytest.param("float", lambda y: y, marks=pytest.mark.slow),
    pytest.param("quantized", lambda y: y.transpose(0, 1), marks=pytest.mark.slow),
], ids=["moved", "selected", "as it is", "quantized inside"])
def test_the_output_of_a_recurrent_net_is_found_behind_movement(inside, move):
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.fc = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 4)
            self.last = nn.Linear(4, 4)

        def forward(self, x):
            y = move(self.rnn(x)[0])
            return self.fc(y) if y.shape[-1] == 8 else self.last(y)

    found, floats = biases(Tagger(), torch.randn(2, 3, 8), {
        **INT32, "rules": [{"match": {"op": "gru"}, "inside": inside}]})
    (name, factors), = ((name, each) for name, each in found.items() if name in ("fc.bias", "last.bias"))
    assert factors == ("rnn:out[0]" if inside == "float" else "rnn.l0.cell.hidden:out", name.replace("bias", "weight"))
    assert name not in floats


@pytest.mark.parametrize("where", ["weight", "activation"])
def test_int32_is_for_biases(where):
    with pytest.raises(ConfigError, match="int32 is for biases"):
        biases(Alone(), torch.randn(2, 8), {"version": 1, "defaults": {where: {"dtype": "int32"}}})
