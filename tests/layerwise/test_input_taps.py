"""Taps show every call of a weighted op, against inputs formed by torch, and leave the graphs as they were."""

import copy

import pytest
import torch
from torch import nn

import qtk
from qtk.graph.graphs import graphs
from qtk.layerwise.input_taps import TAPS, input_taps


class Ops(nn.Module):
    """A layer that is used twice, a square that has no weight, a convolution, a loop over time."""

    def __init__(self):
        super().__init__()
        self.linear, self.conv = nn.Linear(4, 4), nn.Conv1d(3, 2, 2)
        self.rnn = nn.RNN(4, 5, batch_first=True)

    def forward(self, x):
        y = self.linear(torch.tanh(self.linear(x)))
        part = y[:, :, :3]
        return self.rnn(y)[0], self.conv(part @ part)


def prepared(rows=2):
    torch.manual_seed(0)
    float_model, x = Ops().eval(), torch.randn(rows, 3, 4)
    return float_model, qtk.prepare_model(copy.deepcopy(float_model), x), x


def codes(model):
    return {path: graph.code for path, graph in graphs(model).items()}


@torch.no_grad()
def expected_calls(float_model, x):
    """Weight and input of every weighted op, in the order of the calls."""
    linear, rnn = float_model.linear, float_model.rnn
    inner = torch.tanh(linear(x))
    y = linear(inner)
    hidden = torch.cat([torch.zeros(len(x), 1, 5), rnn(y)[0]], 1)
    return {
        "linear.weight": [x, inner], "conv.weight": [y[:, :, :3] @ y[:, :, :3]],
        "rnn.weight_ih_l0": [y.transpose(0, 1)],  # the loop has time first
        "rnn.weight_hh_l0": [hidden[:, step] for step in range(3)],
    }


@pytest.mark.medium
@pytest.mark.sample(1)
@pytest.mark.parametrize("rows", [1, 2, 7])
def test_every_call_of_a_weighted_op_is_seen_and_no_result_changes(rows):
    float_model, model, x = prepared(rows)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    seen = {}
    with torch.no_grad():
        before = model(x)
        with input_taps(model, lambda value, weight, op: seen.setdefault(names.get(id(weight)), []).append(value)):
            during = model(x)
    assert all(torch.equal(own, other) for own, other in zip(before, during, strict=True))
    expected = expected_calls(float_model, x)
    assert None not in seen
    assert {name: len(values) for name, values in seen.items()} == {
        name: len(values) for name, values in expected.items()}
    for name, values in expected.items():
        for value, own in zip(values, seen[name], strict=True):
            torch.testing.assert_close(own, value, rtol=1e-5, atol=1e-6)


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("fails", [False, True])
def test_the_graphs_are_as_they_were(fails):
    _, model, x = prepared()
    before, modules, calls = codes(model), [name for name, _ in model.named_modules()], []

    def run():
        with input_taps(model, lambda value, weight, op: calls.append(value)):
            assert TAPS in codes(model)[""]
            if fails:
                raise KeyboardInterrupt

    if fails:
        with pytest.raises(KeyboardInterrupt):
            run()
    else:
        run()
    assert codes(model) == before
    assert [name for name, _ in model.named_modules()] == modules
    model(x)
    assert calls == []


@pytest.mark.medium
def test_what_the_listener_raises_reaches_the_caller_and_the_taps_are_gone():
    _, model, x = prepared()
    before = codes(model)

    def refuse(value, weight, op):
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"), input_taps(model, refuse):
        model(x)
    assert codes(model) == before


def test_a_module_without_a_graph_has_no_taps():
    calls = []
    with input_taps(nn.Linear(4, 2), lambda value, weight, op: calls.append(value)):
        nn.Linear(4, 2)(torch.ones(1, 4))
    assert calls == []
