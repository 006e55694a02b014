"""Members of float merges in what is quantized behind, against what each operand alone gives."""

import warnings

import pytest
import torch
from torch import nn

import qtk
from qtk.calibration.merged_members import MemberSamples
from qtk.data.valid_tokens import ValidTokens
from qtk.quantizers.modes import in_mode
from qtk.quantizers.quantizer import Mode

BOXES, SCORES = 2000.0, 1.0


def slices(a, b):
    y = a.new_zeros(len(a), 8)
    y[:, :4] = a
    y[:, 4:] = b
    return y


def indices(a, b):
    y = torch.cat([a, a], 1).clone()
    y[:, [0, 2, 5]] = b[:, :3]
    return y


MERGES = {
    "concat": lambda a, b: torch.cat([a, b], 1),
    "concat, moved": lambda a, b: torch.cat([a, b], 1).t().reshape(2, 4, -1).permute(2, 0, 1),
    "concat of a concat": lambda a, b: torch.cat([torch.cat([a, b], 1), b], 1),
    "concat, split and joined": lambda a, b: torch.cat(torch.cat([a, b], 1).split([2, 6], 1)[::-1], 1),
    "stack": lambda a, b: torch.stack([a, b], 1),
    "where": lambda a, b: torch.where(a.sin() > 0, a, b),
    "slices": slices,
    "indices": indices,
    "behind other ops": lambda a, b: torch.cat([a, b], 1).relu() / 4,
}


class Joined(nn.Module):
    """Large boxes and small scores, merged, and a sum behind that has one range."""

    def __init__(self, merge, read=None):
        super().__init__()
        self.boxes, self.scores, self.head = nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(8, 4)
        self.merge, self.read = merge, read or (lambda net, both: both * 1.5)

    def forward(self, x):
        return self.read(self, self.merge(self.boxes(x) * BOXES, self.scores(x).sigmoid() * SCORES))


def simulation(merge, x, read=None, config="openvino"):
    torch.manual_seed(0)
    return qtk.QuantSim(Joined(merge, read).eval(), x, config=config)


def said(sim, data):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sim.compute_encodings(data, progress=False)
    texts = [str(each.message) for each in caught if "not held by their width" in str(each.message)]
    return [[cell.strip() for cell in line.split("│")] for text in texts for line in text.splitlines()[3:]]


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", MERGES)
def test_values_of_a_member_are_what_its_operand_gives(name):
    x = torch.randn(16, 8)
    sim = simulation(MERGES[name], x)
    samples = MemberSamples(sim.simulation, sim.simulation.quantizers)
    with torch.no_grad(), in_mode(sim.simulation.quantizers.values(), Mode.BYPASS):
        with samples.followed():
            sim.model(x)
        net = sim.model
        boxes, scores = net.boxes, net.scores  # parameters of the graph, under their names
        large = torch.nn.functional.linear(x, boxes.weight, boxes.bias) * BOXES
        small = torch.nn.functional.linear(x, scores.weight, scores.bias).sigmoid() * SCORES
    members = list(samples.values.values())[-1]
    kinds = set()
    for values in members.values():
        of = [bool((values[:, None] - other.flatten() * factor).abs().amin(1).le(1e-3).all())
              for other in (large.relu() if "behind" in name else large, small)
              for factor in [0.375 if "behind" in name else 1.5]]
        assert sum(of) == 1, (name, of)
        kinds.add(of.index(True))
    assert kinds == {0, 1}
    assert len(members) >= 2


@pytest.mark.medium
@pytest.mark.parametrize("name", ["concat", "slices"])
def test_what_an_op_reads_of_uneven_members_is_planned_apart(name):
    xs = [torch.randn(32, 8) for _ in range(3)]
    sim = simulation(MERGES[name], xs[0])
    assert "mul_2:out" in sim.quantizers
    assert said(sim, xs) == []
    assert "mul_2:out" not in sim.quantizers
    float_model = Joined(MERGES[name]).eval()
    float_model.load_state_dict(sim.model.state_dict(), strict=False)
    with torch.no_grad():
        expected, simulated = float_model(xs[0])[:, 4:], sim.model(xs[0])[:, 4:]
    assert float(10 * torch.log10(expected.square().sum() / (expected - simulated).square().sum())) > 35


@pytest.mark.medium
def test_a_member_that_a_product_reads_with_others_is_named_with_the_rule():
    x = torch.randn(32, 8)
    sim = simulation(MERGES["concat"], x, lambda net, both: net.head(both * 1.5))
    ((site, _, zeroed, codes, reason, rule),) = said(sim, [x])
    assert (site, zeroed, codes) == ("mul_2:out of concat:in[1]", "100%", "1")
    assert reason == "reaches 1 of 256 codes, as it shares a range with concat:in[0]"
    assert rule == "{match: {path: 'mul_2'}, output: float}"
    amended = simulation(MERGES["concat"], x, lambda net, both: net.head(both * 1.5), config={
        "version": 1, "extends": "openvino", "rules": [{"match": {"path": "mul_2"}, "output": "float"}]})
    assert said(amended, [x]) == []


@pytest.mark.medium
def test_of_members_of_like_ranges_nothing_is_said_and_nothing_is_changed():
    x = torch.randn(32, 8)
    sim = simulation(lambda a, b: torch.cat([a / BOXES, b], 1), x)
    sites = list(sim.quantizers)
    assert said(sim, [x]) == []
    assert list(sim.quantizers) == sites


class Padded(nn.Module):
    """Tokens of two features each of their own, merged; the masked ones are far larger."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x, mask):
        return torch.cat([self.first(x), self.second(x).sigmoid()], -1) * 1.5 + 0 * mask[..., None]


def padded(config):
    torch.manual_seed(0)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    x = torch.where(mask[..., None] == 1, torch.randn(2, 4, 8), 1e5)
    return qtk.QuantSim(Padded().eval(), (x, mask), config=config), x, mask


def test_members_are_sampled_from_valid_tokens_alone():
    sim, x, mask = padded("openvino")
    tokens = ValidTokens(sim.model, "mask")
    samples = MemberSamples(sim.simulation, sim.simulation.quantizers, tokens)
    net, counted = sim.model, x[mask == 1]
    with torch.no_grad(), in_mode(sim.simulation.quantizers.values(), Mode.BYPASS):
        with tokens.listening(), samples.followed():
            sim.model(x, mask)
        first, second = (nn.functional.linear(counted, each.weight, each.bias) for each in (net.first, net.second))
    members = dict(samples.values)[next(site for site in samples.values if site.name == "mul:out")]
    for values, expected in zip(members.values(), (first, second.sigmoid()), strict=True):
        torch.testing.assert_close(values.sort().values, (expected * 1.5).flatten().sort().values)


@pytest.mark.medium
def test_a_calibration_judges_members_by_valid_tokens():
    sim, x, mask = padded("openvino")
    sites = list(sim.quantizers)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sim.compute_encodings([(x, mask)], valid="mask", progress=False)
    assert not [each for each in caught if "not held" in str(each.message)]
    assert list(sim.quantizers) == sites
    unmasked, _, _ = padded("openvino")
    unmasked.compute_encodings([(x, mask)], progress=False)
    assert list(unmasked.quantizers) != sites  # padding makes the members uneven


@pytest.mark.medium
def test_what_observers_see_is_counted_once():
    x = torch.randn(8, 5, 8)

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x):
            y = self.attention(x, x, x)[0]
            return torch.cat([y * 100, x], 1) * 2

    encodings = []
    for sample in (True, False):
        torch.manual_seed(0)
        sim = qtk.QuantSim(Attention().eval(), x, config="openvino", scheme="percentile")
        with pytest.MonkeyPatch.context() as patch:
            if not sample:
                patch.setattr("qtk.calibration.merged_members._readers", lambda graph, sites: {})
            sim.compute_encodings([x, x * 3], progress=False)
        encodings.append({name: each for name, each in sim.encodings().items() if name != "mul_1:out"})
    assert encodings[0].keys() == encodings[1].keys()
    assert all(each.equals(encodings[1][name]) for name, each in encodings[0].items())
