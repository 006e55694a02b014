"""Sets of sites follow from what single sites recover, and from what they lose alone."""

import itertools
import math

import pytest
import torch
from torch import nn

import qtk
from qtk.auto.ranking import LEFT, MOST_RECOVERED, Ranking
from qtk.report.sensitivities import Sensitivity


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 7, 8, 9, 16, 17, 31, 32, 1023])
def test_sets_by_recovery_double_up_to_their_largest_share(count):
    sites = tuple(f"site{index}" for index in range(count))
    counts = [1 << exponent for exponent in range(11) if exponent == 0 or 1 << exponent <= MOST_RECOVERED * count]
    counts += [int(MOST_RECOVERED * count)] if counts[-1] < int(MOST_RECOVERED * count) else []
    assert Ranking(sites, {}).by_recovery() == [sites[:number] for number in (counts if count else [])]


@pytest.mark.parametrize("losses", [
    [], [1.0], [1.0, 1.0], [0.1, 100.0, 1.0, 10.0], [1.0] * 64, [0.0] * 5, [5.0, 0.0, 0.0, 0.0], [math.nan, 1.0, 2.0],
    [2.0 ** -index for index in range(40)],
])
def test_each_set_by_increase_leaves_a_quarter_of_what_the_set_before_leaves(losses):
    alone = {f"site{index}": loss for index, loss in enumerate(losses)}
    sets = Ranking((), alone).by_increase()
    known = {name: 0.0 if math.isnan(loss) else loss for name, loss in alone.items()}
    left = [sum(known.values()), *(sum(known[name] for name in known if name not in chosen) for chosen in sets)]
    assert all(after < LEFT * before for before, after in itertools.pairwise(left[:-1]))
    assert [len(chosen) for chosen in sets][-1:] == ([len(losses) - 1] if len(losses) > 1 else [])
    for chosen in sets:
        assert min(known[name] for name in chosen) >= max(known[name] for name in known if name not in chosen)


def row(name, increase, recovery):
    return Sensitivity(name, (name,), increase, recovery, not math.isnan(recovery), increase)


def test_sites_that_are_left_precise_together_have_the_largest_gain_and_all_losses():
    rows = [row("a", 3.0, -1.0), row("b", 0.5, math.nan), row("l.x", 1.0, 0.2), row("l.y", 2.0, 0.9), row("c", 9, 9)]
    ranking = Ranking.of(rows, {"a": "a", "b": "b", "l.x": "l", "l.y": "l"})
    assert ranking == Ranking(("l", "b"), {"a": 3.0, "b": 0.5, "l": 3.0})


class LogMel(nn.Module):
    """Spectrum, power, mel filters and logarithm in front of a head: errors of the first hide one another."""

    def __init__(self):
        super().__init__()
        frequency = torch.arange(33.0)[:, None]
        angle = frequency * torch.arange(64.0) * torch.pi / 32
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())
        self.register_buffer("mel", (1 - (frequency - 2 - 2 * torch.arange(14.0)).abs() / 3).clamp(min=0))
        self.head = nn.Sequential(nn.Linear(14, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x):
        power = (x @ self.cos.T) ** 2 + (x @ self.sin.T) ** 2
        return self.head(torch.log(power @ self.mel + 1e-6))


@pytest.mark.slow
def test_values_whose_errors_hide_one_another_are_left_in_float_together():
    torch.manual_seed(0)
    data = [10 ** (-2 * torch.rand(32, 1)) * torch.randn(32, 64) for _ in range(10)]  # loud and soft samples
    net = LogMel().eval()
    sim, account = qtk.quantize(net, data, max_drop=0.01, progress=False)
    assert account.reached
    assert account.best.step == "the 6 sites precise that lose most alone"
    assert account.best.sqnr_db > 30
    assert all(f"head.{index}.weight" in sim.quantizers for index in (0, 2))
    assert account.trials[-1] is account.best
