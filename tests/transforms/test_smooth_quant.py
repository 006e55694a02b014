"""SmoothQuant on small nets: where its scales may go, that the function stays, and that the error falls."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qtk
from qtk.channels.channel_scales import ChannelScales
from qtk.graph.insert import remove
from qtk.graph.sites import value_site
from qtk.numerics.error import sqnr_db
from qtk.quantizers.modes import in_mode
from qtk.quantizers.quantizer import Mode
from qtk.transforms.smooth_quant import SmoothQuant
from tests.zoo.models import ZOO
from tests.zoo.prepared import pair

WIDTH = 32
OUTLIERS, FACTOR = [3, 17], 80.0


def outlier_norm(norm, *layers):
    """Makes two channels of a norm 80 times as large, and undoes it in the layers that read them."""
    with torch.no_grad():
        norm.weight[OUTLIERS] *= FACTOR
        norm.bias[OUTLIERS] *= FACTOR
        for layer in layers:
            layer.weight[:, OUTLIERS] /= FACTOR


class Attention(nn.Module):
    """Queries, keys and values read one norm; what goes into ``out`` is linear in the values."""

    def __init__(self, heads=4, kv_heads=4):
        super().__init__()
        self.heads, self.kv_heads, size = heads, kv_heads, WIDTH // heads
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, kv_heads * size)
        self.v, self.out = nn.Linear(WIDTH, kv_heads * size), nn.Linear(WIDTH, WIDTH)
        outlier_norm(self.norm, self.q, self.k, self.v)

    def forward(self, x):
        h = self.norm(x)
        q, k, v = (
            layer(h).unflatten(-1, (heads, -1)).transpose(1, 2)
            for layer, heads in ((self.q, self.heads), (self.k, self.kv_heads), (self.v, self.kv_heads))
        )
        mixed = F.scaled_dot_product_attention(q, k, v, enable_gqa=self.heads != self.kv_heads)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Bilinear(nn.Module):
    """A gated linear unit without an activation, and a residual: ``lin1(x) * lin2(x) + lin3(x)``."""

    def __init__(self):
        super().__init__()
        self.lin1, self.lin2, self.lin3, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        with torch.no_grad():
            self.lin1.weight[OUTLIERS] *= FACTOR
            self.lin3.weight[OUTLIERS] *= FACTOR
            self.down.weight[:, OUTLIERS] /= FACTOR

    def forward(self, x):
        return self.down(self.lin1(x) * self.lin2(x) + self.lin3(x))


class Gated(nn.Module):
    """SiLU(gate) · up: a factor may go into ``up`` alone."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        with torch.no_grad():
            self.up.weight[OUTLIERS] *= FACTOR
            self.down.weight[:, OUTLIERS] /= FACTOR

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Tied(nn.Module):
    """One layer behind two norms."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.fc = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        outlier_norm(self.first, self.fc)
        with torch.no_grad():
            self.second.weight[OUTLIERS] *= FACTOR

    def forward(self, x):
        return self.fc(self.second(torch.tanh(self.fc(self.first(x)))))


class PostNorm(nn.Module):
    """The norm's output is also the residual."""

    def __init__(self):
        super().__init__()
        self.norm, self.fc, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        outlier_norm(self.norm, self.fc)

    def forward(self, x):
        h = self.norm(x)
        return self.out(h + self.fc(h))


class Gelu(nn.Module):
    """Large channels behind a GELU."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        with torch.no_grad():
            self.fc1.weight[OUTLIERS] *= FACTOR
            self.fc2.weight[:, OUTLIERS] /= FACTOR

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


class Clipped(nn.Module):
    """Factors may not pass a ReLU6."""

    def __init__(self):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(WIDTH, WIDTH), nn.ReLU6(), nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            self.fc1.weight *= 8

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class TiedGelu(Gelu):
    """As ``Gelu``, but the second layer has another use."""

    def forward(self, x):
        return self.fc2(F.gelu(self.fc2(F.gelu(self.fc1(x))).repeat(1, 1, 2)))


class Experts(nn.Module):
    """A weight for each of three experts, behind one norm."""

    def __init__(self):
        super().__init__()
        self.norm, self.weight = nn.LayerNorm(WIDTH), nn.Parameter(torch.randn(3, WIDTH, WIDTH) / 6)
        with torch.no_grad():
            self.norm.weight[OUTLIERS] *= FACTOR
            self.weight[:, OUTLIERS] /= FACTOR

    def forward(self, x):
        tokens = self.norm(x).flatten(0, 1).expand(3, -1, -1)
        return torch.bmm(tokens, self.weight).mean(0)


class Concat(nn.Module):
    """Convolutions into parts of the channels of one, grouped."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 16, 3, padding=1), nn.Conv2d(4, 16, 1)
        self.c = nn.Conv2d(32, 8, 3, padding=1, groups=2)
        with torch.no_grad():
            self.b.weight[3] *= FACTOR
            self.c.weight[:, 3] /= FACTOR

    def forward(self, x):
        x = x.flatten()[: 4 * 8 * 8 * 2].reshape(2, 4, 8, 8)
        return self.c(torch.cat([self.a(x), self.b(x)], 1).relu())


NETS = {
    "shared norm": (Attention, {"norm", "q", "k", "v", "out"}),
    "grouped queries": (lambda: Attention(4, 2), {"norm", "q", "k", "v", "out"}),
    "bilinear": (Bilinear, {"lin1", "lin3", "down"}),
    "gated": (Gated, {"up", "down"}),
    "tied": (Tied, {"first", "second", "fc"}),
    "post-norm": (PostNorm, {"fc"}),
    "gelu": (Gelu, {"fc2"}),
    "tied gelu": (TiedGelu, set()),
    "relu6": (Clipped, set()),
    "experts": (Experts, {"norm", ""}),
    "concat": (Concat, {"a", "b", "c"}),
}


def batches(dtype=torch.float64):
    torch.manual_seed(1)
    return list(torch.randn(6, 4, 16, WIDTH, dtype=dtype).unbind())


def net(name, dtype=torch.float64):
    torch.manual_seed(0)
    return NETS[name][0]().eval().to(dtype)


def changed_modules(before, model):
    now = model.state_dict()
    return {key.rpartition(".")[0] for key, value in before.items() if not torch.equal(now[key], value)}


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("alpha", ["auto", 0.5])
@pytest.mark.parametrize("name", NETS)
def test_the_function_stays_and_factors_go_where_they_may(name, alpha):
    model, data = net(name), batches()
    expected = [model(x).detach() for x in data]
    sim = qtk.QuantSim(model, data[0])
    state = {key: value.clone() for key, value in model.state_dict().items()}
    result = qtk.apply_smooth_quant(sim, data, alpha=alpha, progress=False)
    assert not result.undone
    assert bool(result.applied) == bool(NETS[name][1])
    assert changed_modules(state, sim.model) <= NETS[name][1]
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items()), "the user's model"
    remove(sim.model)
    for x, before in zip(data, expected, strict=True):
        assert float((sim.model(x).detach() - before).abs().max()) <= 1e-10 * float(before.abs().max())


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("name", [name for name, (_, layers) in NETS.items() if layers])
def test_the_simulation_comes_closer_to_float(name):
    model, data = net(name, torch.float32), batches(torch.float32)
    reference = model(data[0]).detach()
    decibels = []
    for smooth in (False, True):
        sim = qtk.QuantSim(model, data[0])
        if smooth:
            result = qtk.apply_smooth_quant(sim, data, progress=False)
            assert all(group.after < group.before for group in result.applied)
        sim.compute_encodings(data, progress=False)
        with torch.no_grad():
            decibels.append(sqnr_db(reference, sim.model(data[0])))
    assert decibels[1] > decibels[0] + (3 if name in ("shared norm", "grouped queries", "tied", "gated") else 0)


def applied(name, **settings):
    model = net(name, torch.float32)
    sim = qtk.QuantSim(model, batches(torch.float32)[0])
    return sim, qtk.apply_smooth_quant(sim, batches(torch.float32), progress=False, **settings)


@pytest.mark.medium
def test_layers_that_share_a_value_are_one_group():
    _, result = applied("shared norm")
    assert result.groups[0].name == "norm:out"
    assert "norm.weight, norm.bias" in result.groups[0].detail
    assert len(result.groups) == 2  # and the input of out


@pytest.mark.medium
def test_a_tied_layer_has_one_scale_for_all_its_inputs():
    _, result = applied("tied")
    (group,) = result.applied
    assert group.name == "first:out and 1 more"
    assert all(f"{norm}.{part}" in group.detail for norm in ("first", "second") for part in ("weight", "bias"))


@pytest.mark.medium
def test_only_one_factor_of_a_product_carries_the_scale():
    _, result = applied("gated")
    assert "up.weight" in result.applied[0].detail
    assert "gate" not in result.applied[0].detail


def test_a_multiplication_is_inserted_where_nothing_can_absorb_the_scale():
    sim, result = applied("gelu")
    (group,) = result.applied
    assert "multiplication of 4096 elements, 1/32 of the multiplications of its layers" in group.detail
    assert 10 * math.log10(group.before / group.after) >= 3
    assert "fc2.channel_scale:out" in sim.quantizers
    assert "gelu:out" not in sim.quantizers


@pytest.mark.medium
def test_an_inserted_multiplication_must_earn_its_cost_whatever_alpha():
    model = net("gelu", torch.float32)
    with torch.no_grad():
        model.fc1.weight[OUTLIERS] /= FACTOR
    data = batches(torch.float32)
    for alpha in ("auto", 0.5):
        sim = qtk.QuantSim(model, data[0])
        result = qtk.apply_smooth_quant(sim, data, alpha=alpha, progress=False)
        (group,) = [group for group in result.groups if group.name == "gelu:out"]
        assert "3 dB are required" in group.detail
        assert group in result.skipped
        assert "smooth_scale" not in " ".join(sim.model.state_dict())


def test_narrow_layers_are_not_worth_a_multiplication():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 1), nn.SiLU(), nn.Conv2d(16, 16, 3, groups=16)).eval()
    with torch.no_grad():
        model[0].weight[3] *= FACTOR
    data = torch.randn(3, 2, 3, 8, 8)
    sim = qtk.QuantSim(model, data[0])
    result = qtk.apply_smooth_quant(sim, data, progress=False)
    detail = "its layers make 5 multiplications an element, 32 are required"
    assert [group.detail for group in result.groups][1] == detail


@pytest.mark.medium
def test_a_weight_with_another_use_is_left():
    _, result = applied("tied gelu")
    assert any("its weight is read elsewhere too" in group.detail for group in result.groups)
    assert not result.applied


@pytest.mark.medium
def test_the_residual_reads_the_norm_itself():
    sim, result = applied("post-norm")
    assert "norm:out" in sim.quantizers
    assert "fc.channel_scale:out" in sim.quantizers
    assert "multiplication" in result.applied[0].detail


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize(("path", "place"), [("norm", 0), ("v", 1)])
def test_a_fixed_range_is_respected(path, place):
    """Of the input of layers, and of a value on the way to it."""
    config = {"version": 1, "extends": "default", "rules": [{"match": {"path": path}, "output": {"range": [-99, 99]}}]}
    data = batches(torch.float32)
    sim = qtk.QuantSim(net("shared norm", torch.float32), data[0], config=config)
    result = qtk.apply_smooth_quant(sim, data, progress=False)
    assert result.groups[place].detail == f"the config fixes the range of {path}:out"


class Branches(nn.Module):
    """The same channels are read by a layer, and added to others that are far larger."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        h = self.first(x).relu()
        return self.out(h + self.second(h))


@pytest.mark.medium
def test_the_error_of_values_that_no_layer_reads_counts():
    """Both factors of a sum are quantized, and have the scales of the sum."""
    torch.manual_seed(0)
    model, data = Branches().eval(), batches(torch.float32)
    prepared = qtk.prepare_model(model, data[0])
    sim = qtk.QuantSim(prepared, data[0])
    scales = ChannelScales(prepared, (data[0],), {})
    layers = SmoothQuant(prepared, scales, sim.plan)
    assert [value_site(site.tapped.node).name for site in layers.scaled_sites] == ["relu:out", "second:out"]
    with layers.gathering(), torch.no_grad():
        for x in data:
            prepared(x)
    (with_sites,) = [group for group in layers.groups(0.5) if group.steps]
    layers.scaled_sites.clear()
    (without,) = [group for group in layers.groups(0.5) if group.steps]
    assert with_sites.before != without.before


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["min_max", "percentile", "mse", "tf_enhanced", "moving_average"])
def test_every_scheme(scheme):
    data, model = batches(torch.float32), net("shared norm", torch.float32)
    reference, decibels = model(data[0]).detach(), []
    for smooth in (False, True):
        sim = qtk.QuantSim(model, data[0], scheme=scheme)
        if smooth:
            qtk.apply_smooth_quant(sim, data, progress=False)
        sim.compute_encodings(data, progress=False)
        with torch.no_grad():
            decibels.append(sqnr_db(reference, sim.model(data[0])))
    assert decibels[1] > decibels[0] + 1


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("config", ["default", "onnxruntime", "dynamic", "dynamic_per_token"])
@pytest.mark.parametrize("name", ["shared norm", "gelu"])
def test_every_target(name, config):
    data, model = batches(torch.float32), net(name, torch.float32)
    reference, decibels = model(data[0]).detach(), []
    for smooth in (False, True):
        sim = qtk.QuantSim(model, data[0], config=config)
        if smooth:
            assert qtk.apply_smooth_quant(sim, data, progress=False).applied
        sim.compute_encodings(data, progress=False)
        with torch.no_grad():
            decibels.append(sqnr_db(reference, sim.model(data[0])))
    assert decibels[1] > decibels[0]


@pytest.mark.medium
def test_weights_alone():
    data, model = batches(torch.float32), net("shared norm", torch.float32)
    sim = qtk.QuantSim(model, data[0], weight_bits=4, activation_bits=None)
    result = qtk.apply_smooth_quant(sim, data, progress=False)
    assert all(group.after <= group.before for group in result.groups)


@pytest.mark.sample(6)
@pytest.mark.medium
@pytest.mark.parametrize("name", ZOO)
def test_the_zoo_keeps_its_function(name):
    entry = ZOO[name]
    (model, prepared), inputs = pair(name), entry.inputs()
    sim = qtk.QuantSim(prepared, inputs)
    result = qtk.apply_smooth_quant(sim, [inputs], alpha=0.5, progress=False)
    assert not result.undone
    batch = 3 if entry.dynamic else 2
    with in_mode(sim.quantizers.values(), Mode.BYPASS):
        torch.testing.assert_close(entry.run(sim.model, batch), entry.run(model, batch), rtol=1e-4, atol=1e-4)


TIMM = ("vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "convnext_atto", "resnet18", "mobilenetv3_small_100",
        "efficientnet_b0", "regnetx_002", "densenet121", "repvit_m0_9", "mixer_s32_224", "maxvit_rmlp_pico_rw_256")


@pytest.mark.slow
@pytest.mark.parametrize("name", TIMM)
def test_models_of_timm_with_outliers_keep_their_function(name):
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model(name).eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, (nn.LayerNorm, nn.BatchNorm2d)) and module.weight is not None:
                module.weight[:2] *= 40 if isinstance(module, nn.LayerNorm) else 4  # 40 in each would overflow
            if isinstance(module, nn.Linear) and not module.weight.any():
                module.weight.normal_()  # a classifier of zeros would hide everything
    data = list(torch.randn(2, 2, *model.default_cfg["input_size"]).unbind())
    sim = qtk.QuantSim(model, data[0])
    result = qtk.apply_smooth_quant(sim, data, progress=False)
    assert result.applied
    assert not result.undone
    with torch.no_grad(), in_mode(sim.quantizers.values(), Mode.BYPASS):
        before, after = model(data[1]).double(), sim.model(data[1]).double()
        exact = model.double()(data[1].double())
    rounding = float((before - exact).abs().max())  # of some of these nets, 1e-3 of the largest output
    assert float((after - exact).abs().max()) <= max(1e-4 * float(exact.abs().max()), 10 * rounding)
