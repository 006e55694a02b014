"""What is reported free may be scaled, at any factor; what is not, may not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qtk.channels.channel_scales import ChannelScales
from qtk.errors import SpecError
from tests.transforms.scaling import Scaled, difference, prepare, wide
from tests.transforms.scaling_nets import batch, linear, net, randomized
from tests.zoo.models import ZOO
from tests.zoo.prepared import slow_but

QUICK = ("residual", "inverted_residual", "vit", "language_model", "torch_encoder_layer", "splits", "functional")


@pytest.mark.sample(3)
@pytest.mark.medium
@pytest.mark.parametrize("name", slow_but(ZOO, *QUICK))
def test_random_factors_of_all_free_classes_keep_the_function(name: str) -> None:
    scaled = Scaled(ZOO[name].model(), ZOO[name].inputs())
    assert scaled.error(scaled.scaled(scaled.random_factors())) <= 1e-10


TIMM: dict[str, tuple[int, dict[str, Any], int]] = {  # image size, options, number of weights with free inputs
    "vit_tiny_patch16_224": (32, {"img_size": 32}, 37),
    "deit_tiny_patch16_224": (32, {"img_size": 32}, 37),
    "swin_tiny_patch4_window7_224": (64, {"img_size": 64, "window_size": 2}, 40),
    "convnext_atto": (32, {}, 16),
    "mobilenetv3_small_100": (32, {}, 26),
    "efficientnet_b0": (32, {}, 16),
    "resnet18": (32, {}, 20),
    "resnet50": (32, {}, 53),
    "regnety_002": (32, {}, 70),
    "mixer_s32_224": (64, {"img_size": 64}, 17),
    "maxvit_nano_rw_256": (64, {"img_size": 64}, 50),
    "densenet121": (32, {}, 120),
    "repvit_m0_9": (32, {}, 21),
    "mobilenetv2_050": (32, {}, 52),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(TIMM, "vit_tiny_patch16_224"))
def test_random_factors_keep_the_function_of_timm_models(name: str) -> None:
    timm = pytest.importorskip("timm")
    size, options, free = TIMM[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = randomized(timm.create_model(name, **options).eval())
        x = torch.randn(2, 3, size, size)
    scaled = Scaled(model, x)
    assert scaled.error(scaled.scaled(scaled.random_factors())) <= 1e-10
    assert len(scaled.free_weights()) == free


class OwnPython(nn.Module):
    """A model that cannot be one graph; its Python may read a parameter of a graph that it calls."""

    def __init__(self, reads: bool):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4))
        self.reads = reads

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x)
        if float(y.sum()) > 1e9:  # what data decides
            y = y * 2
        return y + self.first.get_parameter("2.weight").sum() if self.reads else y


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("reads", [False, True])
def test_a_parameter_that_the_models_own_python_reads_stays(reads: bool) -> None:
    scaled = Scaled(OwnPython(reads), batch(3))
    assert type(scaled.model).__name__ == "PreparedTree"
    assert [read.weight for read in scaled.scales.inputs] == ["first.0.weight", "first.2.weight"]
    assert scaled.free_weights() == (set() if reads else {"first.2.weight"})
    assert scaled.error(scaled.scaled(scaled.random_factors())) <= 1e-10


class Branches(nn.Module):
    """Data decides which of two modules runs; they may share a weight."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.a, self.b = (nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)) for _ in range(2))
        if shared:
            self.a[0].weight = self.b[0].weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.a(x) if float(x.sum()) > 1e3 else self.b(x)
        return out


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("shared", [False, True])
def test_what_the_example_inputs_do_not_reach_stays(shared: bool) -> None:
    scaled = Scaled(Branches(shared), batch(3))
    assert scaled.free_weights() == (set() if shared else {"b.2.weight"})
    changed = scaled.scaled(scaled.random_factors())
    for x in (batch(3), batch(3) + 100):
        assert difference(scaled.model, changed, (x,), {}) <= 1e-10


def test_the_values_that_change_are_known() -> None:
    scaled = Scaled(
        net(lambda m, x: m.c(F.gelu(m.b(F.relu(m.a(x)).flatten(1)))), a=nn.Conv1d(2, 3, 1), b=linear(15, 4),
            c=linear(4, 2)), batch(2, 5),
    )
    factors = torch.ones(scaled.scales.num_variables)
    factors[scaled.writes("a.weight")[1]] = 2
    names = [node.name for node in scaled.scales.scaled_values(factors)]
    assert names == ["conv1d", "relu", "view"] or names == ["conv1d", "relu", "flatten"]
    changed = scaled.scaled(torch.where(scaled.scales.free, 2.0, 1.0).double())
    for node in scaled.model.graph.nodes:
        if node.name in names:
            assert not torch.equal(value_of(scaled.model, node.name, scaled), value_of(changed, node.name, scaled))


def value_of(model: nn.Module, name: str, scaled: Scaled) -> Tensor:
    recorded: dict[str, Tensor] = {}

    class Recorder(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            recorded[n.name] = super().run_node(n)
            return recorded[n.name]

    Recorder(model).run(*scaled.args)
    return recorded[name]


def test_factors_must_be_positive_and_of_free_classes() -> None:
    scaled = Scaled(net(lambda m, x: m.b(F.relu(m.a(x))), a=linear(3, 4), b=linear(4, 2)), batch(3))
    ones = torch.ones(scaled.scales.num_variables)
    assert scaled.scales.parameter_factors(ones) == {}
    for wrong in (ones[1:], -ones, ones * float("nan"), ones * 2):
        with pytest.raises(SpecError, match="factors"):
            scaled.scales.parameter_factors(wrong)


@pytest.mark.medium
def test_the_model_is_as_it_was() -> None:
    model = prepare(ZOO["vit"].model(), wide(ZOO["vit"].inputs())).train()
    before = {name: parameter for name, parameter in model.named_parameters()}
    code = model.code
    ChannelScales(model, (wide(ZOO["vit"].inputs()),), {})
    assert model.training
    assert model.code == code
    assert not model._forward_pre_hooks
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
