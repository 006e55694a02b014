import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qtk
from qtk.graph.flow import Flow
from qtk.numerics.error import sqnr_db
from qtk.planning.feeds import Feeds
from qtk.planning.patterns import match_patterns
from qtk.workflow.prepare import prepare_model
from tests.planning.plans import BARE, by_name, plan_of
from tests.zoo.attention import Block, TinyViT
from tests.zoo.models import ZOO

STREAM = {"match": {"feeds": ["layer_norm", "rms_norm"]}, "output": "float"}
SUMS = {"match": {"op": ["add", "concat"], "feeds": ["layer_norm"]}, "output": {"bits": 16}}


def fed(model, *inputs):
    """Node name → what it feeds."""
    graph = prepare_model(model.eval(), inputs).graph
    formulas = {node: match for match in match_patterns(graph) for node in match.nodes}
    feeds = Feeds(graph, Flow(graph), formulas, {})
    return {node.name: feeds.names(node) for node in graph.nodes}


class Net(nn.Module):
    """``code(norm, layer, x)`` as a module."""

    def __init__(self, code):
        super().__init__()
        self.code, self.norm, self.layer = code, nn.LayerNorm(8), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return self.code(self, x)


@pytest.mark.sample(4)
@pytest.mark.medium
@pytest.mark.parametrize(
    ("code", "feeds"),
    [
        (lambda net, x: net.norm(x + net.layer(x)), True),
        (lambda net, x: net.norm(net.layer(x)[:, 0]), True),
        (lambda net, x: net.norm(net.layer(x).mean(1)), True),
        (lambda net, x: net.norm(x - net.scale * net.layer(x)), True),
        (lambda net, x: net.norm(torch.cat([net.layer(x), x], 1)), True),
        (lambda net, x: net.norm(net.layer(x).split(2, 1)[0]), True),
        (lambda net, x: (net.layer(x) + x) * torch.rsqrt((net.layer(x) + x).square().mean(-1, True) + 1e-5), False),
        (lambda net, x: net.norm(F.relu(net.layer(x))), False),
        (lambda net, x: net.norm(x * net.layer(x)), False),  # a gate
        (lambda net, x: net.layer(x) + net.norm(x), False),
    ],
)
def test_values_feed_a_norm_through_sums_merges_and_movement(code, feeds):
    assert ("layer_norm" in fed(Net(code), torch.randn(2, 4, 8))["linear"]) is feeds


@pytest.mark.medium
def test_a_norm_that_is_spelled_out_is_fed_by_what_it_reads():
    class Written(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.weight = nn.Linear(8, 8), nn.Parameter(torch.ones(8))

        def forward(self, x):
            x = x + self.layer(x)
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight

    names = fed(Written(), torch.randn(2, 4, 8))
    assert names["add"] == {"rms_norm"}
    assert "rms_norm" in names["linear"]
    assert "rms_norm" not in names["pow_1"] if "pow_1" in names else "rms_norm" not in names["square"]


@pytest.mark.medium
def test_a_group_norm_of_one_group_is_a_layer_norm():
    class Tokens(nn.Module):
        def __init__(self, groups):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(8, 8, 1), nn.GroupNorm(groups, 8)

        def forward(self, x):
            return self.norm(x + self.conv(x))

    x = torch.randn(2, 8, 4, 4)
    assert "layer_norm" in fed(Tokens(1), x)["add"]
    assert fed(Tokens(4), x)["add"] == {"group_norm"}  # as in convolutional nets


@pytest.mark.medium
def test_sums_of_a_vit_and_the_constants_in_them_get_the_setting_of_the_rule():
    decided = by_name(plan_of(TinyViT(), torch.randn(2, 3, 8, 8), {**BARE, "rules": [SUMS]}))
    wide = {name for name, site in decided.items() if site.spec.dtype.bits == 16}
    sums = {"add:out", "blocks.0.add:out", "blocks.0.add_1:out", "blocks.1.add:out"}
    assert wide == sums | {"concat:out", "patch:out", "cls_token", "pos_embed"}
    assert decided["blocks.1.add_1:out"].spec.dtype.bits == 8  # read by the head, no norm behind it


@pytest.mark.medium
def test_a_layer_that_reads_the_stream_keeps_8_bits():
    class PostNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.q, self.k, self.norm = (
                nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8))

        def forward(self, x):
            x = x + F.relu(self.embed(x))
            return self.norm(x + F.relu(self.q(x)) * F.relu(self.k(x)))

    quant_plan = plan_of(PostNorm(), torch.randn(2, 4, 8), {**BARE, "rules": [STREAM]})
    decided = by_name(quant_plan)
    assert "add:out" not in decided
    assert decided["q:in[0]"].spec.dtype.name == "uint8"
    assert decided["k:in[0]"].spec == decided["q:in[0]"].spec
    assert decided["k:in[0]"].leader.name == "q:in[0]"  # one value, one encoding


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("config", ["default", "onnxruntime"])
def test_shipped_targets_keep_the_stream_of_a_transformer_out_of_8_bits(config):
    sim = qtk.QuantSim(nn.Sequential(Block(), Block()), torch.randn(2, 5, 16), config=config)
    eights = [str(site) for site, decided in sim.plan.items() if decided.spec.dtype.bits == 8]
    assert not [name for name in eights if "add" in name and name != "1.add_1:out"]
    assert {"0.mlp.0.weight", "0.norm1:out", "0.mlp.1:out", "0.attn.softmax:out"} <= set(eights)


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("config", ["default", "onnxruntime"])
def test_shipped_targets_leave_the_residuals_of_convolutional_nets_in_8_bits(config):
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.bn, self.conv2 = nn.Conv2d(4, 4, 3, 1, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, 1, 1)
            self.norm = nn.GroupNorm(2, 4)

        def forward(self, x):
            x = F.relu(self.bn(self.conv1(x)) + x)
            return self.norm(self.conv2(x) + x)

    sim = qtk.QuantSim(Residual(), torch.randn(2, 4, 8, 8), config=config)
    assert {decided.spec.dtype.bits for decided in sim.plan.values() if decided.factors is None} == {8}
    assert {"relu:out", "add_1:out"} <= {str(site) for site in sim.plan}


@pytest.mark.medium
@pytest.mark.parametrize(
    ("code", "feeds"),
    [
        (lambda net, x: net.layer(x).topk(2, -1), True),
        (lambda net, x: net.layer(x).softmax(-1).topk(2, -1), True),
        (lambda net, x: (net.layer(x).sigmoid() + net.scale).topk(2, -1), True),
        (lambda net, x: (net.layer(x).softmax(-1) @ x.transpose(-1, -2)).topk(2, -1), False),
        (lambda net, x: net.norm(net.layer(x).softmax(-1)), False),
    ],
)
def test_softmax_and_sigmoid_hand_on_that_the_largest_are_looked_for(code, feeds):
    names = fed(Net(code), torch.randn(2, 4, 8))["linear"]
    assert ("topk" in names) is feeds
    assert "layer_norm" not in names


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize(("config", "bits"), [("default", 16), ("onnxruntime", None), ("openvino", None)])
def test_shipped_targets_keep_routers_out_of_8_bits(config, bits):
    entry = ZOO["dispatched_experts"]
    decided = by_name(qtk.QuantSim(entry.model(), entry.inputs(), config=config).plan)
    assert {decided[name].spec.dtype.bits for name in ("router:out", "softmax:out") if name in decided} == (
        set() if bits is None else {bits}
    )


ROOTS = [
    lambda x: (x.abs() + 1e-7).sqrt(), lambda x: x.sum(1, keepdim=True).rsqrt().expand(-1, 9, -1),
    lambda x: (x + 1e-7) ** 0.5, lambda x: torch.pow(x + 1e-7, -0.25), lambda x: x.clamp(min=1e-7).log10(),
    torch.log1p, torch.asinh,
]


class Spectrum(nn.Module):
    """Magnitudes and energies of a short-time Fourier transform, and their roots and logarithms."""

    def __init__(self):
        super().__init__()
        self.basis, self.layer = nn.Conv1d(1, 18, 16, 8, bias=False), nn.Conv1d(9 * len(ROOTS), 4, 1)
        angles = torch.outer(torch.arange(9.0), torch.arange(16.0)) * (2 * torch.pi / 16)
        self.basis.weight.data = torch.cat([angles.cos(), angles.sin()])[:, None]

    def forward(self, x):
        real, imaginary = self.basis(x).chunk(2, 1)
        return self.layer(torch.cat([root(real * real + imaginary * imaginary) for root in ROOTS], 1))


@pytest.mark.sample(2)
@pytest.mark.medium
@pytest.mark.parametrize("config", ["default", "qnn_htp", "onnxruntime", "openvino", "xnnpack", "tensorrt", "coreml"])
def test_what_a_root_or_logarithm_reads_is_kept_out_of_8_bits(config):
    sim = qtk.QuantSim(Spectrum().eval(), torch.randn(2, 1, 64), config=config)
    eights = {str(site) for site, decided in sim.plan.items() if decided.spec.dtype.bits == 8}
    assert not [name for name in eights if name.startswith(("mul", "add", "clamp", "sum"))]
    assert {"basis.weight", "layer.weight"} <= eights


def gain(net, x):
    """A share that depends on the input."""
    return 1 / (1 + x.abs().mean(-1, keepdim=True))


@pytest.mark.sample(3)
@pytest.mark.medium
@pytest.mark.parametrize(
    ("code", "feeds"),
    [
        (lambda net, x: (net.layer(x).sum(1) / 4).sqrt(), True),
        (lambda net, x: torch.rsqrt(net.scale + gain(net, x) * (net.layer(x) - net.scale)), True),  # a running variance
        (lambda net, x: ((net.layer(x) * x.sign()).sum(1) / x.sign().sum(1)).log(), True),  # masked
        (lambda net, x: (x.square().sum(1) / net.layer(x).sum(1)).log(), True),
        (lambda net, x: torch.lerp(net.scale, net.layer(x), 0.1).sqrt(), True),
        (lambda net, x: torch.addcmul(net.scale, net.layer(x), x, value=0.1).sqrt(), True),
        (lambda net, x: net.layer(x).cumsum(1).log1p(), True),
        (lambda net, x: net.layer(x).tanh().sqrt(), False),
        (lambda net, x: net.norm(x / net.layer(x)), False),
        (lambda net, x: net.norm(2 / net.layer(x)), False),
        (lambda net, x: net.norm(x * net.layer(x).sqrt()), True),
    ],
)
def test_values_feed_roots_and_logarithms_through_products_and_quotients_which_have_their_relative_errors(code, feeds):
    assert (not {"root", "logarithm"}.isdisjoint(fed(Net(code), torch.rand(2, 4, 8))["linear"])) is feeds


class RunningEnergy(nn.Module):
    """The logarithm of the mean energy so far of the samples that a mask keeps, and a layer on it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x, mask):
        return self.layer(torch.log((x.square() * mask).cumsum(1) / mask.cumsum(1) + 1e-3))


@pytest.mark.medium
@pytest.mark.parametrize("config", ["default", "onnxruntime"])
def test_a_masked_energy_loses_about_what_rounding_of_its_input_does(config):
    torch.manual_seed(0)

    def batch():
        levels = torch.logspace(-0.5, 0.5, 8) * torch.logspace(-0.3, 0.3, 16)[:, None, None]
        return torch.randn(16, 20, 8) * levels, (torch.arange(20)[:, None] < torch.randint(5, 20, (16, 1, 1))).float()

    model, (x, mask) = RunningEnergy().eval(), batch()
    sim = qtk.QuantSim(model, (x, mask), config=config)
    sim.compute_encodings([batch() for _ in range(3)], progress=False)
    step = float(x.max() - x.min()) / 255
    expected = model(x, mask)
    of_input = model((x / step).round() * step, mask)
    assert sqnr_db(expected, sim.model(x, mask)) > sqnr_db(expected, of_input) - 3


class Held(nn.Module):
    """Layers around a state in a buffer, which becomes ``code(state, x)``."""

    def __init__(self, code):
        super().__init__()
        self.code, self.layer, self.last = code, nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("state", torch.zeros(1, 8))

    def forward(self, x):
        self.state = self.code(self.state, self.layer(x))
        return self.last(self.state)


class Given(Held):
    """As ``Held``, with the state as an input and an output."""

    def forward(self, x, state):
        state = self.code(state, self.layer(x))
        return self.last(state), state


@pytest.mark.sample(2)
@pytest.mark.medium
@pytest.mark.parametrize(
    ("code", "accumulates"),
    [
        (lambda state, x: 0.9 * state + 0.1 * x, True),
        (lambda state, x: state + 0.1 * (x - state), True),
        (lambda state, x: torch.lerp(state, x, 0.1), True),
        (lambda state, x: torch.maximum(state * 0.9, x), True),
        (lambda state, x: torch.cat([state[:, 1:], state[:, -1:] + x[:, :1]], 1), True),
        (lambda state, x: torch.cat([state[:, 4:], x[:, 4:]], 1), False),  # what was last seen
        (lambda state, x: x.sigmoid() * state + x, False),  # a gate
        (lambda state, x: torch.addcmul(state, x, x, value=0.1), True),
        (lambda state, x: torch.addcmul(x, x.sigmoid(), state), False),  # a gate
        (lambda state, x: torch.addcmul(x, x.new_ones(8), state, value=0.9), True),
        (lambda state, x: (state + x).tanh(), False),
    ],
)
def test_a_state_that_is_in_the_sum_of_its_next_value_has_16_bits(code, accumulates):
    x, state = torch.randn(1, 8), torch.randn(1, 8)
    held = qtk.QuantSim(Held(code).eval(), x)
    given = qtk.QuantSim(Given(code).eval(), (x, state), states={"state": 1})
    for sim in (held, given):
        bits = {str(site): decided.spec.dtype.bits for site, decided in sim.plan.items()}
        assert bits["state:input"] == (16 if accumulates else 8)
        assert bits["layer:out"] == 8


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("config", ["default", "onnxruntime"])
def test_a_leaky_sum_over_many_calls_keeps_its_accuracy(config):
    torch.manual_seed(0)
    calls = [torch.randn(1, 8) + sign for sign in (1, -1) for _ in range(100)]
    model = Held(lambda state, x: 0.99 * state + x).eval()
    sim = qtk.QuantSim(model, calls[0], config=config)
    sim.compute_encodings(qtk.Sequences(calls, reset=200), progress=False)
    with torch.no_grad():
        expected, found = (torch.cat([each(x) for x in calls]) for each in (model, sim.model))
    assert sqnr_db(expected, found) > 34


class Glued(nn.Module):
    """A residual block whose sum is Python's: data decide in it, so that its parts are captured one by one."""

    def __init__(self):
        super().__init__()
        self.norm, self.layer, self.conv = nn.LayerNorm(8), nn.Linear(8, 8), nn.Conv1d(8, 8, 1)

    def forward(self, x):
        y = self.layer(self.norm(x))
        y = y + x if float(y.sum()) > -1e9 else y
        return self.norm(y) + self.conv(x.mT).mT


@pytest.mark.medium
@pytest.mark.parametrize(("config", "stream"), [("default", 16), ("onnxruntime", None)])
def test_what_the_python_around_islands_adds_up_is_a_stream(config, stream):
    sim = qtk.QuantSim(Glued().eval(), torch.randn(2, 4, 8), config=config)
    assert {part.rung for part in sim.model.report.parts} >= {"python", "export"}
    bits = {site.name: decided.spec.dtype.bits for site, decided in sim.plan.items()}
    assert bits.get("norm.input:input") == stream
    assert bits.get("layer:out") == stream
    assert (bits["layer.input:input"], bits["conv:out"]) == (8, 8)  # codes of a product, and of a convolution


class ClassOfTokens(nn.Module):
    """A transformer whose probabilities are returned."""

    def __init__(self):
        super().__init__()
        self.body = TinyViT()

    def forward(self, x):
        return self.body(x).softmax(-1)


def test_litert_computes_attention_in_float_and_the_probabilities_of_classes_in_codes():
    sim = qtk.QuantSim(ClassOfTokens().eval(), torch.randn(2, 3, 8, 8), config="litert")
    names = {site.name for site in sim.plan}
    attention = {name for name in names if name.startswith("body.blocks.0.attn.") and name.endswith(":out")}
    assert attention == {f"body.blocks.0.attn.{layer}:out" for layer in ("qkv", "proj")}
    assert "softmax:out" in names


class LogMel(nn.Module):
    """Energies of bands on a logarithmic scale, by filters that take something off or do not, and a layer."""

    def __init__(self, least=0.0, power=2.0):
        super().__init__()
        self.register_buffer("filters", torch.rand(33, 8, generator=torch.Generator().manual_seed(0)) + least)
        self.register_buffer("window", torch.hann_window(64))
        self.power, self.layer = power, nn.Linear(8, 4)

    def forward(self, x):
        magnitude = torch.stft(x, 64, 32, window=self.window, return_complex=True).abs().transpose(1, 2)
        return self.layer(torch.log((magnitude**self.power @ self.filters).abs() + 1e-6))


def loud_and_soft(seed):
    torch.manual_seed(seed)
    return 10 ** (-3 * torch.rand(8, 1)) * torch.randn(8, 640)


@pytest.mark.parametrize("config", ["default", "onnxruntime"])
@pytest.mark.parametrize("power", [2.0, 1.0])
def test_what_mel_filters_of_a_logarithm_add_up_keeps_its_digits(config, power):
    torch.manual_seed(0)
    model = LogMel(power=power).eval()
    sim = qtk.QuantSim(model, loud_and_soft(0), config=config)
    sim.compute_encodings([loud_and_soft(seed) for seed in range(4)], progress=False)
    x = loud_and_soft(9)
    assert sqnr_db(model(x).detach(), sim.model(x).detach()) > 25
    assert "layer.weight" in sim.quantizers


def test_filters_that_take_something_off_read_codes():
    sim = qtk.QuantSim(LogMel(least=-0.5).eval(), loud_and_soft(0), config="onnxruntime")
    assert {"abs:out", "filters"} <= set(sim.quantizers)
