import pytest
import torch
from torch import nn

import qtk
from qtk.calls.calls import Call
from qtk.transforms.proof import Group, rewrite
from qtk.transforms.reference import TOLERANCE
from qtk.transforms.result import Outcome
from qtk.transforms.steps import ScaleParameter, steps_of


def prepared():
    torch.manual_seed(0)
    layers = [layer for _ in range(5) for layer in (nn.Linear(6, 6), nn.ReLU())]
    return qtk.prepare_model(nn.Sequential(*layers).eval(), torch.randn(4, 6))


def scaled(first, second, factor, name):
    """Scales the outputs of one linear layer up and the inputs of another down by ``factor``."""
    up, down = torch.full((6, 1), factor).double(), torch.full((1, 6), 1 / factor).double()
    steps = (ScaleParameter(f"{first}.weight", up), ScaleParameter(f"{first}.bias", up[:, 0]),
             ScaleParameter(f"{second}.weight", down))
    return Group(name, steps, f"into {first}")


def run(model, groups):
    x = torch.randn(4, 6)
    expected = model(x)
    result = rewrite(model, Call((torch.randn(4, 6),), {}, None), groups, transform="scaling", nothing="nothing")
    torch.testing.assert_close(model(x), expected)
    return result


@pytest.mark.medium
def test_groups_that_keep_the_function_are_kept():
    model = prepared()
    result = run(model, [scaled(0, 2, 2.0, "a"), scaled(2, 4, 3.0, "b"), Group("c", (), "for a reason")])
    assert [group.outcome for group in result.groups] == [Outcome.APPLIED, Outcome.APPLIED, Outcome.SKIPPED]
    assert 0 <= result.difference <= TOLERANCE[torch.float32]
    assert len(steps_of(model)) == 6
    assert model.report.transforms == (result.summary,)


@pytest.mark.medium
@pytest.mark.sample(1)
@pytest.mark.parametrize("wrong", [{"b"}, {"a"}, {"d"}, {"a", "c"}, {"a", "b", "c", "d"}])
def test_groups_that_change_it_are_undone_one_by_one(wrong):
    model = prepared()
    groups = []
    for name, first in zip("abcd", (0, 2, 4, 6), strict=True):
        group = scaled(first, first + 2, 2.0, name)
        groups.append(Group(name, group.steps[:2], "") if name in wrong else group)
    result = run(model, groups)
    assert {group.name for group in result.undone} == wrong
    assert {group.name for group in result.applied} == set("abcd") - wrong
    assert len(steps_of(model)) == 3 * (4 - len(wrong))
