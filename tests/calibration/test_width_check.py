"""What a calibration says of the sites that their width does not hold, of each member of a merged group on its own."""

import warnings

import pytest
import torch
from torch import nn

import qtk
from qtk.calibration.width_check import FEWEST_CODES


def said(sim, data, **options):
    """The rows of the warning, as words; none if there is none."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sim.compute_encodings(data, progress=False, **options)
    texts = [str(each.message) for each in caught if "not held by their width" in str(each.message)]
    return [[cell.strip() for cell in line.split("│")] for text in texts for line in text.splitlines()[3:]]


class Joined(nn.Module):
    """Large boxes beside small scores, and a product of both."""

    def __init__(self):
        super().__init__()
        self.boxes, self.scores, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(torch.cat([self.boxes(x) * 2000, self.scores(x).sigmoid()], 1))


@pytest.mark.medium
def test_a_member_that_reaches_few_codes_is_named_with_the_rule():
    x = torch.randn(64, 8)
    sim = qtk.QuantSim(Joined().eval(), x, config="onnxruntime")
    ((site, sqnr, zeroed, codes, reason, rule),) = said(sim, [x])
    assert site == "concat:in[1]"
    assert int(codes) < FEWEST_CODES
    assert (float(sqnr) < 3, float(zeroed.rstrip("%")) > 50) == (True, True)
    assert "shares a range with concat:out" in reason
    assert rule == "{match: {path: 'concat'}, output: float}"
    amended = qtk.QuantSim(Joined().eval(), x, config={
        "version": 1, "extends": "onnxruntime", "rules": [{"match": {"path": "concat"}, "output": "float"}]})
    assert said(amended, [x]) == []


class Stream(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.GRUCell(4, 8), nn.Linear(8, 4)

    def forward(self, x, h):
        h = self.cell(x, h)
        return self.out(h), h


@pytest.mark.medium
def test_a_state_that_was_only_ever_zero_is_named():
    x, zero = torch.randn(16, 4), torch.zeros(16, 8)
    ((site, *_, reason, rule),) = said(qtk.QuantSim(Stream().eval(), (x, zero), config="openvino"), [(x, zero)] * 2)
    assert site == "h:input"
    assert "was 0 in all data" in reason
    assert "states={'h': 1}" in rule
    assert said(qtk.QuantSim(Stream().eval(), (x, zero), config="openvino"), [(x, torch.randn(16, 8))]) == []


@pytest.mark.medium
def test_a_state_that_is_zero_for_a_while_is_a_state_that_was_seen():
    x, zero = torch.randn(16, 4), torch.zeros(16, 8)
    sim = qtk.QuantSim(Stream().eval(), (x, zero), config="onnxruntime")
    assert said(sim, [(x, zero)] * 12 + [(x, torch.randn(16, 8))] * 12) == []


def test_a_softmax_over_many_values_is_named():
    class Attention(nn.Module):
        def forward(self, q, k):
            return torch.softmax(q @ k.transpose(0, 1), -1) @ k

    rule = {"match": {"op": "softmax"}, "output": {"range": [0.0, 1.0]}}
    x = torch.randn(600, 4), torch.randn(600, 4)
    runtime = qtk.QuantSim(Attention().eval(), x, config={"version": 1, "extends": "onnxruntime", "rules": [rule]})
    assert [row[5] for row in said(runtime, [x]) if row[0] == "softmax:out"] == [
        "{match: {path: 'softmax'}, output: float}"]  # it has no kernels for 16 bits
    rows = said(qtk.QuantSim(Attention().eval(), x, config={"version": 1, "rules": [rule]}), [x])
    assert [(row[0], row[5]) for row in rows] == [("softmax:out", "{match: {path: 'softmax'}, output: {bits: 16}}")]
    assert float(rows[0][2].rstrip("%")) > 75


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("bits", [4, 8])
def test_of_ordinary_values_nothing_is_said(bits):
    x = torch.randn(64, 16)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.GELU(), nn.Linear(16, 4)).eval()
    assert said(qtk.QuantSim(model, x, activation_bits=bits), [x, torch.randn(64, 16)]) == []


class Decay(nn.Module):
    def forward(self, t, x):
        return (t[:, None] * torch.tensor([-1.0, -40.0])).exp() * x


def test_large_arguments_of_an_exponential_are_named_where_the_target_has_no_floats():
    t, x = torch.linspace(0, 1, 64), torch.ones(64, 2)
    rows = said(qtk.QuantSim(Decay(), (t, x), config="qnn_htp"), [(t, x)])
    assert {row[0]: ("only an exponential reads it" in row[4], row[5]) for row in rows if row[0] != "x:input"} == {
        "t:input": (True, "{match: {path: 't'}, output: {bits: 16}}"),
        "mul:out": (True, "{match: {path: 'mul'}, output: {bits: 16}}"),
    }


def test_arguments_that_sixteen_bits_do_not_hold_either_are_to_be_in_float():
    """The last interval of a rendered ray is 1e10 long: of the others' steps of one range nothing is left."""

    class Ray(nn.Module):
        def forward(self, density, ends):
            lengths = torch.cat([ends[:, 1:] - ends[:, :-1], torch.full_like(ends[:, :1], 1e10)], 1)
            return 1 - torch.exp(-density * lengths)

    data = (torch.rand(8, 16), torch.sort(torch.rand(8, 16) * 4)[0])
    sim = qtk.QuantSim(Ray(), data, config="qnn_htp")
    with pytest.warns(UserWarning, match=r"{match: {path: 'mul'}, output: float}"):
        sim.compute_encodings([data], progress=False)
