"""High biases move into the next layer, and the outputs on what was seen stay."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qtk
from qtk.calls.calls import Call
from qtk.channels.channel_scales import ChannelScales
from qtk.transforms.absorb_bias import AbsorbBias, absorbable_biases, folded_statistics
from qtk.transforms.equalize import equalize_layers
from qtk.transforms.result import Outcome
from qtk.transforms.steps import ScaleParameter, steps_of
from tests.transforms.scaling import difference, prepare
from tests.transforms.scaling_nets import net
from tests.transforms.test_equalize import conv, images, unequal


def high(model: nn.Module) -> nn.Module:
    """The first bias far above what the weights make of the input, except in the first two channels."""
    with torch.no_grad():
        bias = model.get_parameter("a.bias")
        bias[2:] += 100 * model.get_parameter("a.weight").abs().flatten(1).sum(1)[2:]
    return model


def statistics(model: nn.Module, x: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """What a batch norm would know of the first layer."""
    with torch.no_grad():
        y = model.a(x).transpose(0, 1).flatten(1)  # type: ignore[operator,union-attr]
    return {"a.weight": (y.mean(1), y.std(1))}


@pytest.mark.medium
@pytest.mark.parametrize("second", ["1 x 1", "3 x 3", "grouped", "linear"])
def test_what_a_rectifier_lets_pass_moves_behind_it(second: str) -> None:
    layers = {"1 x 1": conv(6, 3), "3 x 3": conv(6, 3, 3, stride=2), "grouped": conv(6, 4, 3, groups=2)}
    if second == "linear":
        model = high(net(lambda m, x: m.b(F.relu(m.a(x))), a=nn.Linear(4, 6), b=nn.Linear(6, 3)))
        x = images(4)
    else:
        model = high(net(lambda m, x: m.b(F.relu(m.a(x))), a=conv(2, 6), b=layers[second]))
        x = images(2, 6, 6)
    prepared = prepare(unequal(model), x)
    known, before = statistics(model, x), copy.deepcopy(prepared)
    result = equalize_layers(prepared, Call((x,), {}, None), known)
    assert [group.outcome for group in result.groups] == [Outcome.APPLIED, Outcome.APPLIED]
    assert "4 of 6 channels" in result.groups[0].detail
    assert difference(before, prepared, (x,), {}) <= 1e-10
    middle = {name: module.get_parameter("a.bias").abs().max() for name, module in (("was", before), ("is", prepared))}
    assert middle["is"] < middle["was"] / 4


def test_the_amount_is_three_standard_deviations_below_the_mean() -> None:
    model = high(net(lambda m, x: m.b(F.relu(m.a(x))), a=nn.Linear(4, 6), b=nn.Linear(6, 3)))
    x = images(4)
    prepared = prepare(model, x)
    mean, std = torch.full((6,), 5.0), torch.ones(6)
    scales = ChannelScales(prepared, (x,), {})
    (group,) = absorbable_biases(prepared, scales, {"a.weight": (mean, std)})
    (step,) = group.steps
    expected = torch.full((6,), 2.0).double()
    expected[:2] = 0  # the smallest that was seen is below 0
    torch.testing.assert_close(step.amount, expected)


def test_a_hundredth_of_a_standard_deviation_is_the_least_that_moves() -> None:
    model = high(net(lambda m, x: m.b(F.relu(m.a(x))), a=nn.Linear(4, 6), b=nn.Linear(6, 3)))
    x = images(4)
    prepared = prepare(model, x)
    mean, std = torch.full((6,), 3.02), torch.ones(6)  # three standard deviations, and what would move
    mean[3] = 3.005
    (group,) = absorbable_biases(prepared, ChannelScales(prepared, (x,), {}), {"a.weight": (mean, std)})
    assert (group.steps[0].amount > 0).tolist() == [False, False, True, False, True, True]  # 0 and 1 were below 0


@pytest.mark.medium
@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: net(lambda m, x: m.b(F.relu(m.a(x))), a=conv(2, 6), b=conv(6, 3, 3, padding=1)), "padding"),
        (lambda: net(lambda m, x: m.b(F.relu(m.a(x))), a=conv(2, 6), b=nn.ConvTranspose2d(6, 3, 2)), "padding"),
        (lambda: net(lambda m, x: m.b(F.relu6(m.a(x))), a=conv(2, 6), b=conv(6, 3)), "relu6 follows it"),
        (lambda: net(lambda m, x: m.b(m.a(x)), a=conv(2, 6), b=conv(6, 3)), "conv2d follows it"),
        (lambda: net(lambda m, x: m.b(y := F.relu(m.a(x))) + y.sum(), a=conv(2, 6), b=conv(6, 3)), "rectifier"),
        (lambda: net(lambda m, x: m.b(F.relu(m.a(x))) + m.b(x[:, :1].expand(-1, 6, -1, -1)), a=conv(2, 6),
                     b=conv(6, 3)), "no bias of its own"),
        (lambda: net(lambda m, x: m.b(F.relu(m.a(x))), a=conv(2, 6), b=nn.Conv2d(6, 3, 1, bias=False)),
         "no bias of its own"),
    ],
)
def test_others_are_left_with_the_reason(build, reason: str) -> None:  # type: ignore[no-untyped-def]
    model, x = high(build()), images(2, 6, 6)
    prepared = prepare(model, x)
    (group,) = absorbable_biases(prepared, ChannelScales(prepared, (x,), {}), statistics(model, x))
    assert not group.steps
    assert reason in group.detail


@pytest.mark.medium
def test_folded_batch_norms_tell_the_statistics_and_nothing_is_absorbed_twice() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 6, 1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 3, 1))
    with torch.no_grad():
        model[1].bias[2:] = 8.0  # type: ignore[index,operator]
    x = images(2, 6, 6) * 0.1
    prepared = prepare(model, x)
    qtk.fold_batch_norms(prepared)
    before = copy.deepcopy(prepared)
    mean, _ = folded_statistics(prepared)["0.weight"]
    result = equalize_layers(prepared, Call((x,), {}, None))
    assert [group.name for group in result.applied] == ["bias of 0 → 3", "0 → 3"]
    assert difference(before, prepared, (x,), {}) <= 1e-10
    (step,) = (step for step in steps_of(prepared) if isinstance(step, AbsorbBias))
    factor = next(step.factor for step in steps_of(prepared) if isinstance(step, ScaleParameter)
                  and step.parameter == "0.bias")
    torch.testing.assert_close(folded_statistics(prepared)["0.weight"][0], (mean - step.amount) * factor)
    assert not equalize_layers(prepared, Call((x,), {}, None)).applied
