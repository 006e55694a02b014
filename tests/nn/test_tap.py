"""Who may be skipped."""

import pytest
from torch import nn

from qtk.nn.tap import Tap, all_idle, all_repeatable


class Switch(Tap):
    idle = True
    repeatable = False


def test_a_module_without_taps_is_idle():
    assert all_idle(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))


def test_one_active_tap_at_any_depth_is_enough():
    first, deep = Switch(), Switch()
    model = nn.Sequential(first, nn.Sequential(nn.ReLU(), nn.ModuleDict({"deep": deep})))
    assert all_idle(model)
    deep.idle = False
    assert not all_idle(model)
    assert all_idle(model[0])
    deep.idle, first.idle = True, False
    assert not all_idle(model)


def test_a_tap_is_asked_about_itself():
    tap = Switch()
    assert all_idle(tap)
    tap.idle = False
    assert not all_idle(tap)


def test_every_kind_of_tap_says_when_it_is_idle():
    with pytest.raises(NotImplementedError):
        all_idle(Tap())


def test_only_taps_that_say_so_and_modules_without_hooks_are_repeatable():
    model = nn.Sequential(nn.ReLU(), Switch())
    assert all_repeatable(model[0])
    assert not all_repeatable(model)
    model[1].repeatable = True
    assert all_repeatable(model)
    handle = model[0].register_forward_hook(lambda *given: None)
    assert not all_repeatable(model)
    handle.remove()
    assert all_repeatable(model)
