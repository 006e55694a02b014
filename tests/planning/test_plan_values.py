import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qtk
from qtk.config.load import load_config
from qtk.graph.coverage import unknown_ops
from qtk.planning.planner import plan
from qtk.workflow.prepare import prepare_model
from tests.planning.plans import BARE, PER_CHANNEL, ConvReluConv, WeightsAsInputs, by_name, plan_of, weights_as_inputs


def test_a_supergroup_keeps_only_its_last_quantizer():
    quant_plan = plan_of(ConvReluConv(), torch.randn(2, 3, 9, 9), {**BARE, "supergroups": [["conv", "relu"]]})
    assert "conv1:out" not in by_name(quant_plan)
    assert "relu:out" in by_name(quant_plan)
    reasons = {site.name: why for site, why in quant_plan.unquantized.items()}
    assert "supergroup conv → relu" in reasons["conv1:out"]


class TapInside(ConvReluConv):
    def forward(self, x):
        hidden = self.conv1(x)
        return self.conv2(self.relu(hidden)), hidden


def test_a_value_that_someone_else_reads_is_not_swallowed_by_a_supergroup():
    assert "conv1:out" in by_name(
        plan_of(TapInside(), torch.randn(2, 3, 9, 9), {**BARE, "supergroups": [["conv", "relu"]]})
    )


def test_the_longest_supergroup_wins():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)

        def forward(self, x):
            return F.relu(self.bn(self.conv(x)))

    config = {**BARE, "supergroups": [["conv", "batch_norm"], ["conv", "batch_norm", "relu"]]}
    names = list(by_name(plan_of(Net(), torch.randn(2, 3, 4, 4), config)))
    assert [name for name in names if name.endswith(":out")] == ["relu:out"]


def test_an_op_without_a_row_is_listed_and_its_value_quantized_where_it_is_read():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain, self.head = nn.Parameter(torch.randn(4)), nn.Linear(4, 2)

        def forward(self, x):
            return self.head(torch.special.bessel_j0(x) + torch.special.bessel_j0(self.gain))

    prepared = prepare_model(Net().eval(), torch.randn(2, 3, 4), dynamic_shapes=None)
    name = "aten.special_bessel_j0.default"
    assert unknown_ops(prepared) == (name,)
    decided = plan(prepared, load_config(BARE), weight_bits=8, activation_bits=8, scheme="min_max")
    read = [site.name for site, p in decided.items() if "bessel" in p.reason]
    assert read == ["special_bessel_j0:out"]
    left = {site.name for site, why in decided.unquantized.items() if why == f"read by {name}, not in the op table"}
    assert left == {"x:input", "gain"}


def test_io_settings_leave_model_inputs_and_outputs_in_float():
    config = {**BARE, "io": {"inputs": "float", "outputs": "float"}}
    names = list(by_name(plan_of(ConvReluConv(), torch.randn(2, 3, 9, 9), config)))
    assert names == ["conv1.weight", "conv1:out", "relu:out", "conv2.weight"]


def test_values_without_elements_are_no_sites():
    class Prefixed(nn.Module):  # as rotary embeddings do with the tokens before the image, of which there may be none
        def forward(self, x):
            return torch.cat([x[:, :0], x[:, :0] * 3.0, x * 2.0], 1)

    config = {**BARE, "rules": [{"match": {"op": "concat"}, "output": {"bits": 8}}]}
    quant_plan = plan_of(Prefixed(), torch.randn(2, 4), config)
    assert set(by_name(quant_plan)) == {"x:input", "mul_1:out", "concat:out"}
    assert {site.name: why for site, why in quant_plan.unquantized.items()}["mul:out"] == "has no elements"


def test_a_model_input_that_is_used_as_weight_is_quantized_as_an_activation():
    decided = plan_of(WeightsAsInputs(), weights_as_inputs(), PER_CHANNEL)
    inputs = {name: str(site.spec) for name, site in by_name(decided).items() if name.endswith(":input")}
    assert inputs == dict.fromkeys(
        ["x:input", "kernel:input", "flat:input", "table:input"], "uint8 per_tensor asymmetric"
    )
    assert {site.name: reason for site, reason in decided.unquantized.items()} == {
        "bias:input": "read as bias, scale or shift by conv2d"
    }


class Reversed(nn.Module):
    """Divides by a standard deviation and multiplies with it again, as RevIN does."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        std = torch.sqrt(x.var(1, keepdim=True) + 1e-5)
        return self.head(x / std) * std


@pytest.mark.parametrize("config", ["default", "qnn_htp"])
def test_a_divisor_stays_in_float_with_other_readers_too_and_what_its_root_is_taken_of(config):
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 2, 64)[:, None]
    sim = qtk.QuantSim(Reversed().eval(), x, config=config)
    reasons = {site.name: reason for site, reason in sim.plan.unquantized.items()}
    divides = "divides: a value that rounds to 0 would make the result infinite"
    edge = "at the edge of where the function that reads it is real, which rounding may cross"
    assert (reasons["sqrt:out"], reasons["add:out"]) == (divides, edge)
    sim.compute_encodings([x], progress=False)
    assert sim.model(x).isfinite().all()
    assert {"x:input", "head.weight", "mul:out"} <= set(sim.quantizers)


class Domains(nn.Module):
    """Functions that are real on one side alone of what they may read."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 8)

    def forward(self, x):
        y = self.body(x)
        inside = torch.tanh(3 * y)
        return torch.acosh(1 + y.square()), torch.atanh(inside * 0.9999), torch.acos(inside), torch.asin(-inside)


@pytest.mark.parametrize("config", ["default", "onnxruntime", "openvino"])
def test_what_functions_read_at_the_edge_of_their_domain_stays_in_float(config):
    x = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))
    model = Domains().eval()
    assert all(y.isfinite().all() for y in model(x))
    sim = qtk.QuantSim(model, x, config=config)
    sim.compute_encodings([x], progress=False)
    assert all(y.isfinite().all() for y in sim.model(x))
    reasons = {site.name: reason for site, reason in sim.plan.unquantized.items()}
    assert reasons["add:out"] == "at the edge of where the function that reads it is real, which rounding may cross"
    assert {"body.weight", "x:input"} <= set(sim.quantizers)


class Refined(nn.Module):
    """A layer on what a function makes of another layer."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.body, self.delta, self.head = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.function(self.body(x)) + self.delta(x))


LOGARITHMS = {
    "inverse_sigmoid": lambda y: torch.log(y.sigmoid().clamp(min=1e-5) / (1 - y.sigmoid()).clamp(min=1e-5)),
    "softmax": lambda y: y.softmax(-1).log2(),
    "entropy": lambda y: -(y.softmax(-1) * (y.softmax(-1) + 1e-9).log10()),
    "xlogy": lambda y: torch.xlogy(y.sigmoid(), y.sigmoid() + 1e-9),
    "softplus": lambda y: nn.functional.softplus(y).log(),
}


@pytest.mark.sample(2)
@pytest.mark.medium
@pytest.mark.parametrize("config", ["default", "qnn_htp", "onnxruntime"])
@pytest.mark.parametrize("name", LOGARITHMS)
def test_logarithms_of_small_values_are_held_and_have_finite_gradients(name, config):
    model, x = Refined(LOGARITHMS[name]).eval(), 4 * torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    sim = qtk.QuantSim(model, x, config=config)
    sim.compute_encodings([x], progress=False)
    expected, got = model(x), sim.model(x)
    assert 10 * torch.log10(expected.square().sum() / (expected - got).square().sum()) > 30
    got.square().mean().backward()
    assert all(each.grad.isfinite().all() for each in sim.weight_parameters() if each.grad is not None)
    assert {"x:input", "body.weight", "delta.weight", "head.weight"} <= set(sim.quantizers)


ROOTS = {
    "magnitude": lambda y: (y[:, ::2].square() + y[:, 1::2].square() + 1e-9).sqrt().repeat(1, 2),
    "power": lambda y: (y[:, ::2].square() + y[:, 1::2].square() + 1e-9).pow(0.5).repeat(1, 2),
    "hypot": lambda y: torch.hypot(y[:, ::2], y[:, 1::2]).repeat(1, 2),
    "compressed": lambda y: (y.abs() + 1e-6) ** 0.3,
    "mean": lambda y: y.clamp(min=1e-3).pow(torch.tensor(2.7)).pow(1 / 2.7),
}


@pytest.mark.sample(2)
@pytest.mark.medium
@pytest.mark.parametrize("config", ["default", "qnn_htp", "onnxruntime"])
@pytest.mark.parametrize("name", ROOTS)
def test_roots_of_small_values_have_finite_gradients(name, config):
    model, x = Refined(ROOTS[name]).eval(), torch.randn(4096, 8, generator=torch.Generator().manual_seed(0))
    sim = qtk.QuantSim(model, x[:64], config=config)
    sim.compute_encodings([x], progress=False)
    sim.model(x).square().mean().backward()
    assert all(each.grad.isfinite().all() for each in sim.weight_parameters() if each.grad is not None)
    assert {"x:input", "body.weight", "delta.weight", "head.weight"} <= set(sim.quantizers)


@pytest.mark.filterwarnings("ignore:.*not held by their width")
def test_a_negative_power_divides_and_whole_ones_are_rounded():
    class Powers(nn.Module):
        def forward(self, x):
            return (x.square() + 1e-6) ** -2 + (x + 1) ** 3

    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    sim = qtk.QuantSim(Powers(), x, config={"version": 1})
    reasons = {site.name: reason.partition(":")[0] for site, reason in sim.plan.unquantized.items()}
    assert reasons == {"add:out": "divides"}
    sim.compute_encodings([x], progress=False)
    assert sim.model(x).isfinite().all()


class OfInputs(nn.Module):
    """Divides by one input, and takes the logarithm of another."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 4)

    def forward(self, x, std, energy):
        return self.head(x / std) + self.head(energy.log())


def test_inputs_that_divide_or_have_a_logarithm_stay_in_float():
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    energy = torch.logspace(-6, 3, 64)[:, None].expand(64, 8).contiguous()
    model, inputs = OfInputs().eval(), (x, energy.sqrt(), energy)
    sim = qtk.QuantSim(model, inputs, config={"version": 1})
    sim.compute_encodings([inputs], progress=False)
    assert sim.model(*inputs).isfinite().all()
    assert {name for name in sim.quantizers if name.endswith(":input")} == {"x:input"}
