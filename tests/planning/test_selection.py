import pytest
import torch
from torch import nn

import qtk
from qtk.errors import CalibrationError
from qtk.planning.selection import leaders


class Joined(nn.Module):
    def __init__(self, parts=2):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(parts))

    def forward(self, x):
        return torch.cat([part(x) for part in self.parts], 1)


def plan(parts=2):
    return qtk.QuantSim(Joined(parts).eval(), torch.randn(2, 4)).plan


def names(found):
    return [site.name for site in found]


def test_without_names_all_that_own_an_encoding():
    decided = plan()
    assert names(leaders(decided)) == names(site for site in decided if decided[site].leader is None)
    assert len(leaders(decided)) < len(decided)


def test_names_and_globs_in_any_order_come_in_the_order_of_the_plan():
    decided = plan()
    assert names(leaders(decided, ["parts.1.weight", "x:*"])) == ["x:input", "parts.1.weight"]
    assert names(leaders(decided, "*.weight")) == ["parts.0.weight", "parts.1.weight"]


def test_a_follower_stands_for_its_leader():
    decided = plan()
    follower, leader = next((site, made.leader) for site, made in decided.items() if made.leader is not None)
    assert list(leaders(decided, follower.name)) == [leader]


def test_brackets_are_no_glob():
    decided = plan()
    port = next((site for site in decided if "[" in site.name), None)
    assert port is None or list(leaders(decided, port.name)) == [decided[port].leader or port]


@pytest.mark.parametrize(("parts", "hint"), [(2, "parts.0.weight"), (20, r"print\(sim.plan\)")])
def test_an_unknown_name_is_refused_with_a_hint(parts, hint):
    with pytest.raises(CalibrationError, match=rf"no site is called 'parts.0.wait'; .*{hint}"):
        leaders(plan(parts), ["parts.0.wait"])
