import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qtk
from qtk.core.granularity import PerBlock, PerChannel, PerTensor
from qtk.core.site import Site
from qtk.errors import ConfigError, SpecError
from tests.planning.plans import PER_CHANNEL, by_name, leaders, plan_of
from tests.planning.tied_weights import Tied, tied, two_axes
from tests.zoo.models import ZOO


@pytest.mark.medium
@pytest.mark.parametrize(
    ("module", "shape", "axis"),
    [
        (nn.Conv1d(4, 6, 3), (2, 4, 9), 0),
        (nn.Conv3d(4, 6, 1), (2, 4, 3, 3, 3), 0),
        (nn.ConvTranspose2d(4, 6, 3), (2, 4, 5, 5), 1),
        (nn.ConvTranspose1d(4, 6, 3, groups=2), (2, 4, 5), 1),
        (nn.Linear(4, 6), (2, 4), 0),
    ],
)
def test_per_channel_weights_are_kept_along_their_output_axis(module, shape, axis):
    decided = by_name(plan_of(nn.Sequential(module), torch.randn(shape), PER_CHANNEL))
    assert decided["0.weight"].spec.granularity == PerChannel(axis)
    assert decided["0:out"].spec.granularity == PerTensor()


class FunctionalWeights(nn.Module):
    """Weights that reach their op transposed, sliced or reshaped."""

    def __init__(self):
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(5, 7))
        self.packed = nn.Parameter(torch.randn(12, 7))
        self.flat = nn.Parameter(torch.randn(6, 3, 7))
        self.right = nn.Parameter(torch.randn(7, 4))

    def forward(self, x):
        a, b = self.packed.chunk(2, dim=0)
        return (
            F.linear(x, self.transposed.t().t()),
            x @ self.transposed.t(),
            F.linear(x, a) + F.linear(x, b),
            F.linear(x, self.flat.reshape(18, 7)),
            x @ self.right,
        )


def test_the_channel_axis_is_followed_back_to_the_parameter():
    decided = by_name(plan_of(FunctionalWeights(), torch.randn(3, 7), PER_CHANNEL))
    assert decided["transposed"].spec.granularity == PerChannel(0)
    assert decided["packed"].spec.granularity == PerChannel(0)
    assert decided["right"].spec.granularity == PerChannel(1)
    # reshape merges axes 0 and 1: the axis has no place in the parameter, so the value the op reads is quantized
    assert "flat" not in decided
    assert decided["reshape:out"].spec.granularity == PerChannel(0)
    assert decided["reshape:out"].static


def test_blocks_run_along_the_input_channels():
    config = {"version": 1, "defaults": {"weight": {"granularity": "per_block", "block_size": 4}}}
    net = nn.Sequential(nn.Conv2d(8, 6, 3), nn.Flatten(), nn.Linear(24, 5))
    decided = by_name(plan_of(net, torch.randn(2, 8, 4, 4), config))
    assert decided["0.weight"].spec.granularity == PerBlock((1, 4, -1, -1))
    assert decided["2.weight"].spec.granularity == PerBlock((1, 4))


def test_a_block_size_that_does_not_divide_names_every_layer():
    config = {"version": 1, "defaults": {"weight": {"granularity": "per_block", "block_size": 5}}}
    net = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 16), nn.Linear(16, 18), nn.Linear(18, 2))
    with pytest.raises(SpecError, match=r"2\.weight: block_size 5 .*\(18, 16\)(.|\n)*3\.weight"):
        plan_of(net, torch.randn(2, 10), config)


def test_a_parameter_added_to_activations_is_a_constant_operand():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.position, self.gain = nn.Parameter(torch.randn(1, 4)), nn.Parameter(torch.tensor(2.0))

        def forward(self, x):
            return (x + self.position) * self.gain

    decided = by_name(plan_of(Net(), torch.randn(3, 4)))
    assert list(decided) == ["x:input", "position", "add:out", "mul:out"]
    assert decided["position"].static
    assert decided["position"].spec.dtype.name == "uint8"


def test_one_weight_used_twice_has_one_site_and_each_call_its_own_output():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.act = nn.Linear(4, 4), nn.ReLU()

        def forward(self, x):
            return self.act(self.fc(self.act(self.fc(x))))

    names = list(by_name(plan_of(Net(), torch.randn(3, 4))))
    assert names == ["x:input", "fc.weight", "fc:out", "act:out", "fc@1:out", "act@1:out"]


def test_a_weight_computed_from_parameters_is_quantized_where_the_op_reads_it():
    class Standardized(nn.Conv2d):
        def forward(self, x):
            w = self.weight
            w = (w - w.mean(dim=(1, 2, 3), keepdim=True)) / w.std(dim=(1, 2, 3), keepdim=True)
            return F.conv2d(x, w, self.bias)

    quant_plan = plan_of(nn.Sequential(Standardized(3, 4, 3)), torch.randn(2, 3, 5, 5), PER_CHANNEL)
    decided = by_name(quant_plan)
    assert list(decided) == ["input:input", "0.div:out", "0.conv2d:out"]
    assert decided["0.div:out"].spec.granularity == PerChannel(0)
    assert decided["0.div:out"].spec.dtype.name == "int4"


def test_prelu_has_a_slope_a_channel():
    decided = by_name(plan_of(nn.Sequential(nn.PReLU(5)), torch.randn(2, 5), PER_CHANNEL))
    assert decided["0.weight"].spec.granularity == PerChannel(0)


class Products(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared, self.experts = nn.Parameter(torch.randn(6, 5)), nn.Parameter(torch.randn(3, 5, 4))

    def forward(self, x):
        y = x @ self.shared @ self.experts
        return y @ y.transpose(1, 2)


def test_products_with_and_without_weights_are_told_apart():
    config = {"version": 1, "rules": [
        {"match": {"path": "*"}, "output": "float"},
        {"match": {"op": "matmul", "has_weight": True}, "input": {"bits": 4}},
        {"match": {"op": "matmul", "has_weight": False}, "input": {"bits": 6}},
    ], "io": {"inputs": "float"}}
    sim = qtk.QuantSim(Products(), torch.randn(3, 2, 6), config=config)
    widths = {site.name: decided.spec.dtype.bits for site, decided in sim.plan.items() if ":in" in site.name}
    assert widths == {"matmul:in[0]": 4, "matmul_1:in[0]": 4, "matmul_2:in[0]": 6, "matmul_2:in[1]": 6}


def test_experts_have_scales_of_their_own():
    sim = qtk.QuantSim(Products(), torch.randn(3, 2, 6))
    granularities = {site.name: str(decided.spec.granularity) for site, decided in sim.plan.items() if decided.static}
    assert granularities == {"shared": "per_channel(axis=1)", "experts": "per_block(1, -1, 1)"}


EXPERTS = [name for name in ZOO if name.endswith("_experts")]


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("name", EXPERTS)
def test_experts_have_a_scale_for_every_channel_of_every_expert(name):
    entry = ZOO[name]
    decided = by_name(plan_of(entry.model(), entry.inputs(), PER_CHANNEL))
    assert [decided[site].spec.granularity.sizes for site in ("up", "down")] == [(1, 1, -1), (1, 1, -1)]


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("name", EXPERTS)
def test_simulated_experts_multiply_with_the_rounded_weights_exactly(name):
    entry = ZOO[name]
    rules = [{"match": {"path": "*"}, "weight": {"scheme": "min_max"}}]
    sim = qtk.QuantSim(entry.model(), entry.inputs(), activation_bits=None, weight_bits=4,
                       config={"version": 1, "extends": "default", "rules": rules})
    sim.compute_encodings(None, progress=False)
    reference = entry.model()
    with torch.no_grad():
        for site, parameter in reference.named_parameters():
            if parameter.ndim > 1:
                # int4 symmetric, one scale for each row along the last axis
                scale = parameter.abs().amax(-1, keepdim=True) / 7.5
                encoding = sim.encodings()[site]
                torch.testing.assert_close(encoding.scale.flatten(), scale.flatten(), rtol=0.08, atol=0)
                scale = encoding.scale.reshape(scale.shape)
                parameter.copy_((parameter / scale).round().clamp(-8, 7) * scale)
    assert torch.equal(entry.run(sim.model, 9), entry.run(reference, 9))


@pytest.mark.medium
def test_blocks_of_experts_do_not_cross_from_one_to_the_next():
    blocks = {"version": 1, "defaults": {"weight": {"granularity": "per_block", "block_size": 8}}}
    entry = ZOO["dispatched_experts"]
    assert by_name(plan_of(entry.model(), entry.inputs(), blocks))["up"].spec.granularity == PerBlock((1, 1, 8))


class Selected(nn.Module):
    """Parameters of which indices select a part, or that are expanded over the batch, before an op reads them."""

    def __init__(self):
        super().__init__()
        self.weights, self.latent = nn.Parameter(torch.randn(3, 4, 8)), nn.Parameter(torch.randn(1, 5, 8))
        self.offset, self.kernel = nn.Parameter(torch.randn(3, 8)), nn.Parameter(torch.randn(8, 6))
        self.fc = nn.Linear(8, 2)

    def forward(self, x, index):
        batch = x.shape[0]
        chosen = torch.einsum("bi,boi->bo", x, self.weights[index])
        moved = x + self.offset.index_select(0, index)
        spread = torch.bmm(x[:, None], self.kernel.expand(batch, 8, 6))
        return chosen, moved, spread, self.fc(self.latent.expand(batch, -1, -1))


@pytest.mark.medium
def test_parameters_that_indices_select_from_or_that_are_expanded_are_quantized_in_the_parameter():
    inputs = torch.randn(4, 8), torch.tensor([0, 2, 1, 1])
    decided = by_name(plan_of(Selected(), inputs, PER_CHANNEL, weight_bits=8))
    assert {name: str(decided[name].spec.granularity) for name in ("weights", "latent", "offset", "kernel")} == {
        "weights": "per_block(1, 1, -1)", "kernel": "per_channel(axis=1)",
        "latent": "per_tensor", "offset": "per_tensor",
    }
    sim = qtk.QuantSim(Selected(), inputs)
    sim.compute_encodings([inputs], progress=False)
    assert {"weights", "latent", "offset", "kernel"} <= sim.encodings().keys()


def direct_and_transposed(weight, x):
    return F.linear(x, weight), x @ weight.t().contiguous()


def test_on_its_edge_a_weight_that_reaches_its_op_transposed_has_scales_per_output_channel():
    made = tied(direct_and_transposed, granularity="per_channel")
    made.compute_encodings([torch.randn(4, 8)], progress=False)
    found = made.encodings()
    assert found["linear:in[1]"].spec.granularity == PerChannel(0)
    assert found["matmul:in[1]"].spec.granularity == PerChannel(1)
    assert torch.equal(found["linear:in[1]"].scale, found["matmul:in[1]"].scale)
    assert found["matmul:in[1]"].scale.shape == (6,)


def test_on_its_edge_blocks_of_a_transposed_weight_run_along_the_input_channels():
    decided = by_name(tied(direct_and_transposed, granularity="per_block", block_size=4).plan)
    assert decided["linear:in[1]"].spec.granularity == PerBlock((1, 4))
    assert decided["matmul:in[1]"].spec.granularity == PerBlock((4, 1))


def test_direct_and_transposed_readers_of_a_square_weight_share_no_scales():
    class Square(Tied):
        def __init__(self, others):
            super().__init__(others)
            self.left = nn.Linear(8, 8, bias=False)

    config = {"version": 1, "defaults": {"weight": {"granularity": "per_channel"}}, "exclude": ["left"]}
    readers = [lambda w, x: (F.linear(x, w), F.linear(x, w.t()), F.linear(x + 1, w))]
    made = qtk.QuantSim(Square(*readers).eval(), torch.randn(4, 8), config=config)
    first, turned, again = (made.quantizers[f"{name}:in[1]"] for name in ("linear", "linear_1", "linear_2"))
    assert first is again
    assert first is not turned
    assert first.spec == turned.spec


@pytest.mark.medium
def test_readers_with_other_axes_have_the_spec_in_the_axes_that_they_read():
    made = tied(two_axes, exclude=(), granularity="per_channel")
    decided = by_name(made.plan)
    assert decided["left:in[1]"].spec.granularity == decided["linear:in[1]"].spec.granularity == PerChannel(0)
    assert decided["left:in[1]"].leader is None
    assert decided["linear:in[1]"].leader is None
    made.compute_encodings([torch.randn(4, 8)], progress=False)
    assert [made.encodings()[name].scale.shape for name in ("left:in[1]", "linear:in[1]")] == [(6,), (8,)]
    (reason,) = (why for site, why in made.plan.unquantized.items() if site.name == "left.weight")
    assert reason == "linear wants it in another format than left; each reader rounds it once, on its edge"


WIDTHS = [{"match": {"path": "left"}, "weight": {"bits": 4}}, {"match": {"path": "linear"}, "weight": {"bits": 8}}]


@pytest.mark.parametrize(("others", "options"), [
    (two_axes, {"granularity": "per_channel"}),
    (lambda weight, x: (F.linear(x, weight),), {"rules": WIDTHS}),
    (lambda weight, x: (F.linear(x, weight),), {"rules": WIDTHS[::-1]}),
])
def test_a_weight_that_its_readers_want_in_several_formats_is_rounded_once_for_each(others, options):
    made = tied(others, exclude=(), **options)
    made.compute_encodings([torch.randn(4, 8)], progress=False)
    weight = made.model.get_parameter("left.weight")
    for name, axes in (("left:in[1]", weight), ("linear:in[1]", weight if others is not two_axes else weight.t())):
        seen = []
        made.quantizers[name].register_forward_pre_hook(lambda module, inputs, seen=seen: seen.extend(inputs))
        made.model(torch.randn(4, 8))
        assert torch.equal(seen[0], axes)


def test_readers_that_agree_share_the_weight_s_own_site_and_one_more_format_takes_it_from_all():
    def three(weight, x):
        return F.linear(x, weight), F.linear(x + 1, weight)

    assert "left.weight" in tied(three, exclude=()).quantizers
    made = tied(three, exclude=(), rules=[{"match": {"path": "linear_1"}, "weight": {"bits": 4}}])
    assert "left.weight" not in made.quantizers
    assert made.quantizers["left:in[1]"] is made.quantizers["linear:in[1]"]
    assert made.quantizers["linear_1:in[1]"].spec.dtype.name == "int4"


class TiedAndShared(nn.Module):
    """A tied embedding and head, and one weight of three layers."""

    def __init__(self):
        super().__init__()
        self.emb, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.b, self.c, self.d = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.head.weight, self.c.weight, self.d.weight = self.emb.weight, self.b.weight, self.b.weight

    def forward(self, indices):
        return self.head(self.d(self.c(self.b(self.emb(indices)))))


def test_a_weight_in_several_formats_leaves_the_edges_of_another_weight_their_leader():
    indices = torch.randint(0, 16, (4, 5))
    prepared = qtk.prepare_model(TiedAndShared().eval(), indices, modules_to_exclude=["d"])
    made = qtk.QuantSim(prepared, indices, config="onnxruntime")
    assert {"emb:in[0]", "head:in[1]"} <= {site.name for site in made.plan}
    assert made.plan.unquantized[Site.parameter("head.weight")].startswith("head wants it in another format than emb")
    assert leaders(made.plan) == {"c:in[1]": "b:in[1]"}
    assert made.quantizers["c:in[1]"] is made.quantizers["b:in[1]"]


@pytest.mark.medium
def test_what_a_batch_selects_from_a_weight_that_an_excluded_module_reads_stays_in_float():
    def selected(weight, x):
        return (F.linear(x, weight[(x[0, :4] > 0).long()]),)

    made = tied(selected)
    assert "linear:in[1]" not in made.quantizers
    (reason,) = (why for site, why in made.plan.unquantized.items() if "before a batch" in why)
    assert reason.startswith("of left.weight, read by left, excluded by exclude: left")
    made.compute_encodings([torch.randn(4, 8)], progress=False)
    assert not [why for why in made.plan.unquantized.values() if "mask" in why]
    with pytest.raises(ConfigError, match=r"left\.weight stays in float: read by left, excluded"):
        tied(selected, rules=[{"match": {"path": "linear"}, "weight": {"bits": 4}}])


class LearnedQueries(nn.Module):
    """Learned queries that a sum takes in float, to a norm, and a linear layer as codes, in one order or the other."""

    def __init__(self, *, sum_first, expanded):
        super().__init__()
        self.queries, self.layer, self.norm = nn.Parameter(torch.randn(5, 8)), nn.Linear(8, 8), nn.LayerNorm(8)
        self.sum_first, self.expanded = sum_first, expanded

    def forward(self, x):
        queries = self.queries.expand(x.shape[0], 5, 8) if self.expanded else self.queries
        if self.sum_first:
            return self.norm(queries + x) + self.layer(queries)
        made = self.layer(queries)
        return self.norm(queries + (made + x if self.expanded else x)) + made


@pytest.mark.parametrize("expanded", [False, True])
@pytest.mark.parametrize("sum_first", [False, True])
def test_a_constant_of_a_float_stream_is_rounded_for_the_layer_that_multiplies_it(sum_first, expanded):
    model = LearnedQueries(sum_first=sum_first, expanded=expanded).eval()
    x = torch.randn(2, 5, 8)
    sim = qtk.QuantSim(model, x, config="onnxruntime")
    plans = {str(site): plan for site, plan in sim.plan.sites.items()}
    assert "queries" not in plans
    if expanded:  # else the layer is computed from parameters alone, and is one
        assert [str(site) for site in plans["layer.bias"].factors] == ["layer:in[0]", "layer.weight"]
        assert plans["layer:in[0]"].spec.dtype.bits == 8
    sim.compute_encodings([x], progress=False)
    assert float((sim.model(x) - model(x)).norm() / model(x).norm()) < 0.03  # 8 bits: about 1 %


class Gains(nn.Module):
    """Numbers that a sum takes in float, to a norm, and a product as codes."""

    def __init__(self):
        super().__init__()
        self.gains, self.layer, self.norm = nn.Parameter(torch.randn(5, 8)), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(self.gains + x) + self.layer(x * self.gains)


def test_a_constant_of_a_float_stream_is_a_parameter_on_the_edge_of_a_product_of_values():
    x = torch.randn(2, 5, 8)
    plan = qtk.QuantSim(Gains().eval(), x, config="onnxruntime").plan
    (edge,) = [plan for site, plan in plan.sites.items() if str(site) == "mul:in[1]"]
    assert edge.static
    assert "gains" not in map(str, plan.sites)
