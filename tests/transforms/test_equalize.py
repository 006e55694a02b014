"""Cross-layer equalization keeps the function and gives the weights around every channel the same range."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qtk
from qtk.calls.calls import Call
from qtk.transforms.equalize import NOTHING, equalize_layers
from qtk.transforms.result import Outcome
from qtk.transforms.steps import steps_of
from tests.transforms.equalization import NETS, conv, equalized, images, unequal
from tests.transforms.scaling import difference
from tests.transforms.scaling_nets import net, norm


@pytest.mark.medium
@pytest.mark.sample(2)
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


def test_dead_channels_stay() -> None:
    model = unequal(NETS["relu"][0]())
    with torch.no_grad():
        model.get_parameter("a.weight")[2] = 0
        model.get_parameter("b.weight")[:, 4] = 0
    before, after, _ = equalized(model, images(2, 6, 6))
    old, new = dict(before.named_parameters()), dict(after.named_parameters())
    assert torch.equal(old["a.bias"][[2, 4]], new["a.bias"][[2, 4]])
    assert not torch.equal(old["a.bias"][0], new["a.bias"][0])


@pytest.mark.medium
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
