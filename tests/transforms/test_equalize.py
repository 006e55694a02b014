"""Cross-layer equalization keeps the function and gives the weights around every channel the same range."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qtk
from qtk.capture.calls import Call
from qtk.capture.prepared_model import PreparedModel
from qtk.graph.graphs import graphs
from qtk.nn.channel_clamp import ChannelClamp
from qtk.transforms.equalize import NOTHING, equalize_layers
from qtk.transforms.result import Outcome, TransformResult
from qtk.transforms.steps import steps_of
from tests.transforms.scaling import difference, prepare
from tests.transforms.scaling_nets import net, norm


def unequal(model: nn.Module) -> nn.Module:
    """Every weight with rows and columns of very unequal ranges."""
    generator = torch.Generator().manual_seed(11)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            for axis in (0, 1):
                shape = [-1 if other == axis else 1 for other in range(parameter.ndim)]
                spread = torch.exp2(torch.randn(parameter.shape[axis], generator=generator) * 2)
                parameter.data = parameter.data * spread.view(shape)
    return model


def images(*shape: int) -> Tensor:
    return torch.randn(8, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def equalized(model: nn.Module, x: Tensor) -> tuple[PreparedModel, PreparedModel, TransformResult]:
    """The prepared model before and after, and the result."""
    prepared = prepare(model, x)
    before = copy.deepcopy(prepared)
    return before, prepared, equalize_layers(prepared, Call((x,), {}, None))


def conv(into: int, out: int, size: int = 1, **options: int) -> nn.Conv2d:
    return nn.Conv2d(into, out, size, **options)


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {  # net, input, number of groups
    "relu": (lambda: net(lambda m, x: m.b(F.relu(m.a(x))), a=conv(2, 6, 3, padding=1), b=conv(6, 3, 3)), (2, 6, 6), 1),
    "prelu": (lambda: net(lambda m, x: m.b(m.act(m.a(x))), a=conv(2, 6), b=conv(6, 3), act=nn.PReLU(6)), (2, 6, 6), 1),
    "relu6": (lambda: net(lambda m, x: m.b(m.act(m.a(x))), a=conv(2, 6), b=conv(6, 3), act=nn.ReLU6()), (2, 6, 6), 1),
    "hardtanh": (
        lambda: net(lambda m, x: m.b(F.hardtanh(m.a(x), -2.0, 3.0)), a=conv(2, 6), b=conv(6, 3)), (2, 6, 6), 1),
    "clamped from above": (
        lambda: net(lambda m, x: m.b(m.a(x).clamp(max=1.0)), a=conv(2, 6), b=conv(6, 3)), (2, 6, 6), 1),
    "linear chain": (
        lambda: net(lambda m, x: m.c(m.b(m.a(x))), a=nn.Linear(3, 5), b=nn.Linear(5, 4), c=nn.Linear(4, 2)), (3,), 2),
    "depthwise triple": (
        lambda: net(lambda m, x: m.c(F.relu6(m.b(F.relu6(m.a(x))))), a=conv(2, 6), b=conv(6, 6, 3, groups=6),
                    c=conv(6, 3)), (2, 6, 6), 2),
    "residual region": (
        lambda: net(
            lambda m, x: m.head(F.relu((y := F.relu((z := F.relu(m.stem(x))) + m.b(F.relu(m.a(z))))) + m.d(
                F.relu(m.c(y)))).mean((2, 3))),
            stem=conv(2, 4), a=conv(4, 6, 3, padding=1), b=conv(6, 4), c=conv(4, 5), d=conv(5, 4, 3, padding=1),
            head=nn.Linear(4, 3)), (2, 6, 6), 3),
    "grouped and transposed": (
        lambda: net(lambda m, x: m.c(F.relu(m.b(F.relu(m.a(x))))), a=conv(2, 6), b=conv(6, 4, 3, groups=2),
                    c=nn.ConvTranspose2d(4, 6, 2, groups=2)), (2, 6, 6), 2),
    "concat": (
        lambda: net(lambda m, x: m.c(torch.cat([F.relu(m.a(x)), F.relu6(m.b(x))], 1)), a=conv(2, 3), b=conv(2, 4),
                    c=conv(7, 3)), (2, 6, 6), 2),
    "one clamp of a concat": (
        lambda: net(lambda m, x: m.c(F.relu6(torch.cat([m.a(x), m.b(x)], 1))), a=conv(2, 3), b=conv(2, 4),
                    c=conv(7, 3)), (2, 6, 6), 2),
    "one clamp module called twice": (
        lambda: net(lambda m, x: m.c(m.act(m.b(m.act(m.a(x))))), a=conv(2, 3), b=conv(3, 4), c=conv(4, 3),
                    act=nn.ReLU6()), (2, 6, 6), 2),
}


@pytest.mark.parametrize("name", NETS)
def test_the_function_stays_and_the_ranges_become_equal(name: str) -> None:
    build, shape, groups = NETS[name]
    x = images(*shape) * 3
    before, after, result = equalized(unequal(build()), x)
    assert len(result.applied) == len(result.groups) == groups, str(result)
    assert difference(before, after, (x,), {}) <= 1e-10
    other = torch.cat([x.flip(0) * 10, -x])
    assert difference(before, after, (other,), {}) <= 1e-10
    again = equalize_layers(copy.deepcopy(after), Call((x,), {}, None))
    assert {group.outcome for group in again.groups} == {Outcome.SKIPPED}, str(again)
    assert {group.detail for group in again.groups} == {"the ranges are equal already"}
    assert per_tensor_error(after) < per_tensor_error(before)


def per_tensor_error(model: nn.Module) -> float:
    """Relative error of the weights in 4 bits per tensor, each row and column counted alike."""
    errors = []
    for parameter in model.parameters():
        if parameter.ndim > 1:
            scale = parameter.detach().abs().max() / 7
            error = (parameter.detach() - (parameter.detach() / scale).round() * scale).flatten(1).norm(dim=1)
            errors.append(error / parameter.detach().flatten(1).norm(dim=1))
    return float(torch.cat(errors).mean())


def test_two_layers_have_the_closed_form() -> None:
    model = unequal(net(lambda m, x: m.b(F.relu(m.a(x))), a=conv(2, 6, 3), b=conv(6, 3, 3)))
    before, after, _ = equalized(model, images(2, 6, 6))
    old, new = dict(before.named_parameters()), dict(after.named_parameters())
    r1, r2 = old["a.weight"].abs().amax((1, 2, 3)), old["b.weight"].abs().amax((0, 2, 3))
    factor = (r1 * r2).sqrt() / r1
    torch.testing.assert_close(new["a.weight"], old["a.weight"] * factor[:, None, None, None])
    torch.testing.assert_close(new["a.bias"], old["a.bias"] * factor)
    torch.testing.assert_close(new["b.weight"], old["b.weight"] / factor[:, None, None])
    assert torch.equal(new["b.bias"], old["b.bias"])


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


def test_dead_channels_stay() -> None:
    model = unequal(NETS["relu"][0]())
    with torch.no_grad():
        model.get_parameter("a.weight")[2] = 0
        model.get_parameter("b.weight")[:, 4] = 0
    before, after, _ = equalized(model, images(2, 6, 6))
    old, new = dict(before.named_parameters()), dict(after.named_parameters())
    assert torch.equal(old["a.bias"][[2, 4]], new["a.bias"][[2, 4]])
    assert not torch.equal(old["a.bias"][0], new["a.bias"][0])


def test_channels_that_a_norm_makes_are_left_with_the_reason() -> None:
    model = net(lambda m, x: m.b(F.relu(m.norm(x) + m.a(x))), norm=norm(4), a=nn.Linear(4, 4), b=nn.Linear(4, 2))
    _, _, result = equalized(model, images(4))
    (group,) = result.groups
    assert (group.outcome, group.detail) == (Outcome.SKIPPED, "norm.weight makes these channels too")


def test_nothing_to_do() -> None:
    model = net(lambda m, x: m.b(F.gelu(m.a(x))), a=nn.Linear(4, 4), b=nn.Linear(4, 2))
    _, prepared, result = equalized(model, images(4))
    assert result.summary == f"equalize: {NOTHING}"
    assert not steps_of(prepared)


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.slow) for name in
    ("mobilenetv2_050", "resnet18", "regnetx_002", "mobilenetv3_small_100", "efficientnet_b0", "densenet121",
     "repvit_m0_9", "vit_tiny_patch16_224")
])
def test_timm_models_keep_their_function(name: str) -> None:
    timm = pytest.importorskip("timm")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = timm.create_model(name, **({"img_size": 32} if "vit_tiny" in name else {})).double().eval()
        for key, buffer in model.named_buffers():
            if key.endswith("running_var"):
                buffer.uniform_(0.5, 2.0)
        x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    prepared = qtk.prepare_model(model, x)
    qtk.fold_batch_norms(prepared)
    result = equalize_layers(prepared, Call((x,), {}, None))
    assert result.applied
    assert not result.undone
    assert difference(model, prepared, (x,), {}) <= 1e-10


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
