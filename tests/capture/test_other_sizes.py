"""What a graph does at sizes that the example does not have, and what is told of it."""

import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qtk
from qtk.calls.calls import Call
from qtk.capture import other_sizes
from qtk.capture.fallback import capture_graph
from qtk.capture.other_sizes import other_length, try_other_sizes
from qtk.errors import CaptureError


class Branch(nn.Module):
    def forward(self, x):
        return x * 2 if x.shape[0] > 3 else x * 3


class Halves(nn.Module):
    """Treats the halves of an axis of even length apart."""

    def forward(self, x):
        half = x.shape[1] // 2
        return torch.cat([x[:, :half] * 2, x[:, half:]], 1) if x.shape[1] % 2 == 0 else x


class Root(nn.Module):
    """Branches on a length that torch computes with floats."""

    def forward(self, x):
        return x * 2 if int(x.shape[0] ** 0.5) == 4 else x * 3


class Squeezed(nn.Module):
    def forward(self, x):
        return (x + 1).squeeze()


class Loop(nn.Module):
    """A recurrent net in Python, whose loop over time ``torch.export`` unrolls."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        state, states = torch.zeros_like(x[:, 0]), []
        for step in range(x.shape[1]):
            state = torch.tanh(self.fc(x[:, step]) + state)
            states.append(state)
        return torch.stack(states, 1)


class Number(nn.Module):
    """Reads a length as a number, which the graph holds as a constant."""

    def forward(self, x):
        return x / len(x[0])


class Kept(nn.Module):
    """Adds what it computed from the first sizes it saw, as caches of masks do."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        return x + len(x.tolist()) if not torch.compiler.is_exporting() else x + 4.0


@pytest.mark.parametrize(("model", "shape", "good", "bad", "text"), [
    (Branch(), (4, 3), (9, 3), (3, 3), r"x.shape[0] > 3"),
    (Halves(), (4, 6), (2, 8), (4, 5), r"(x.shape[1] % 2) == 0"),
])
def test_a_condition_on_sizes_that_matters_is_told_and_checked(model, shape, good, bad, text):
    prepared = qtk.prepare_model(model, torch.randn(shape), dynamic_shapes="all")
    assert prepared.report.reasons == (f"export: the graph serves sizes where {text}",)
    x = torch.randn(good)
    assert torch.equal(prepared(x), model(x))
    with pytest.raises(CaptureError) as caught:
        prepared(torch.randn(bad))
    assert f"computes what the model does only where {text}" in str(caught.value)


def test_a_condition_on_floats_limits_too():
    prepared = qtk.prepare_model(Root(), torch.ones(18, 3))
    assert torch.equal(prepared(torch.ones(24, 3)), torch.full((24, 3), 2.0))
    with pytest.raises(CaptureError, match=r"only where math\.trunc\(.*x\.shape\[0\].* == 4"):
        prepared(torch.ones(25, 3))


def test_resizing_by_a_factor_keeps_one_graph_of_free_sizes():
    class Resized(nn.Module):
        def forward(self, x):
            return F.pixel_shuffle(x, 2) + F.interpolate(x[:, :1], scale_factor=2, mode="bicubic")

    prepared = qtk.prepare_model(Resized(), torch.randn(2, 4, 6, 6), dynamic_shapes="all")
    assert prepared.report.rung == "export", prepared.report
    x = torch.randn(3, 4, 8, 5)
    torch.testing.assert_close(prepared(x), Resized()(x))


def test_a_condition_that_cannot_be_read_keeps_the_graph_and_is_told(monkeypatch):
    monkeypatch.setattr(other_sizes, "size_guards", lambda size: {f"LShift({size}, 1) > 3": (str(size),)})
    prepared = qtk.prepare_model(nn.Linear(3, 2), torch.randn(4, 3))
    assert prepared.report.rung == "export"
    assert prepared(torch.randn(7, 3)).shape == (7, 2)
    assert "cannot be read: LShift(input.shape[0], 1) > 3" in str(prepared.report)


def test_a_condition_that_does_not_matter_limits_nothing():
    model = Squeezed()
    prepared = qtk.prepare_model(model, torch.randn(4, 3))
    assert prepared.sizes.limits == ()
    assert torch.equal(prepared(torch.ones(1, 3)).squeeze(), model(torch.ones(1, 3)))


def test_a_free_axis_that_serves_one_length_alone_is_fixed():
    model, x = Kept(), torch.randn(4, 3)
    prepared = qtk.prepare_model(model, x)
    assert torch.equal(prepared(x), model(x))
    assert "length fixed at 4: at another the graph computes something else" in str(prepared.report)
    with pytest.raises(CaptureError, match=r"captured for \(4, 3\)"):
        prepared(torch.randn(5, 3))


@pytest.mark.parametrize(("model", "why"), [(Loop(), "the loop over it is unrolled"), (Number(), "reads its length")])
def test_an_axis_that_the_graph_fixes_and_the_model_does_not_is_told_with_the_reason(model, why):
    prepared = qtk.prepare_model(model, torch.randn(2, 6, 4), dynamic_shapes="all")
    (line,) = prepared.report.reasons
    assert line.startswith("export: length fixed at 6: ")
    assert why in line
    with pytest.raises(CaptureError) as caught:
        prepared(torch.randn(2, 7, 4))
    assert why in str(caught.value)
    assert "dynamic_shapes" not in str(caught.value)


def test_asking_for_every_axis_is_no_remedy_for_a_loop_that_would_stay_unrolled():
    prepared = qtk.prepare_model(Loop(), torch.randn(2, 6, 4))
    assert prepared.report.reasons == ()  # the length was not asked to be free
    with pytest.raises(CaptureError, match="axis 1 is fixed: the loop over it is unrolled") as caught:
        prepared(torch.randn(2, 7, 4))
    assert "dynamic_shapes" not in str(caught.value)
    other = qtk.prepare_model(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 6, 4))
    with pytest.raises(CaptureError, match='with dynamic_shapes="all"'):
        other(torch.randn(2, 7, 4))


def test_an_axis_of_length_1_is_freed_where_it_could_be_longer():
    model = nn.Conv1d(3, 4, 1)
    prepared = qtk.prepare_model(model, torch.randn(2, 3, 1), dynamic_shapes="all")
    assert prepared.report.reasons == ()
    for length in (1, 5):
        x = torch.randn(2, 3, length)
        assert torch.equal(prepared(x), model(x))
    assert prepared.example.args[0].shape == (2, 3, 1)


class OneOrMore(nn.Module):
    """Does another thing with one step than with several, so that no graph serves both."""

    def forward(self, x):
        return x.squeeze(1) * 2 if x.shape[1] == 1 else x.mean(1)


def test_an_axis_of_length_1_that_must_stay_so_is_named():
    prepared = qtk.prepare_model(OneOrMore(), torch.randn(2, 1, 3), dynamic_shapes="all")
    assert prepared.report.reasons == (
        "export: axis 1 of input x has length 1 in the example and stays so; give one of 2 or more",
    )
    with pytest.raises(CaptureError, match=r"axis 1 has length 1 in the example") as caught:
        prepared(torch.randn(2, 5, 3))
    assert "dynamic_shapes" not in str(caught.value)


def test_axes_that_weights_fix_are_not_told():
    prepared = qtk.prepare_model(nn.Sequential(nn.Linear(6, 8), nn.Tanh()), torch.randn(2, 5, 6), dynamic_shapes="all")
    assert prepared.report.reasons == ()
    assert prepared.sizes.fixed == {}


RUNS = []


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        RUNS.append(tuple(x.shape))
        return self.fc(x)


def test_without_time_the_model_is_not_run_at_other_sizes():
    model, call = Counted(), Call((torch.randn(5, 3, 4),), {}, None)
    graph = capture_graph(model, [call], "all", verify=False)
    for budget_s, expected in ((0.0, set()), (60.0, {(2, 2, 4), (1, 2, 4), (5, 1, 4), (5, 3, 3)})):
        RUNS.clear()
        assert try_other_sizes(model, graph, call, cost_s=1e-6, budget_s=budget_s) == (frozenset(), None)
        assert set(RUNS) == expected
    RUNS.clear()
    try_other_sizes(model, graph, call, cost_s=1.0, budget_s=0.9)  # the first run would take longer
    assert RUNS == []


def test_the_time_of_a_slow_model_counts():
    class Slow(Counted):
        def forward(self, x):
            if not torch.compiler.is_exporting():
                time.sleep(0.02)
            return super().forward(x)

    model, call = Slow(), Call((torch.randn(5, 3, 4),), {}, None)
    graph = capture_graph(model, [call], "all", verify=False)
    RUNS.clear()
    try_other_sizes(model, graph, call, cost_s=0.01, budget_s=0.05)
    assert 1 <= len(RUNS) <= 2


def test_another_length_is_near_and_not_1():
    assert [other_length(length) for length in (1, 2, 3, 9)] == [2, 3, 2, 8]


def test_a_large_batch_is_tried_at_two_rows_and_at_one():
    model, call = Counted(), Call((torch.randn(64, 3, 4),), {}, None)
    graph = capture_graph(model, [call], "batch", verify=False)
    RUNS.clear()
    try_other_sizes(model, graph, call, cost_s=1e-6, budget_s=60.0)
    assert RUNS[:2] == [(2, 3, 4), (1, 3, 4)]


def test_sizes_that_were_compared_are_not_run_again():
    model, call = Counted(), Call((torch.randn(1, 3, 4),), {}, None)
    doubled = Call((torch.randn(2, 3, 4),), {}, None)
    graph = capture_graph(model, [call], "batch", verify=False)
    for compared in ([], [call]):
        RUNS.clear()
        try_other_sizes(model, graph, doubled, cost_s=1e-6, budget_s=60.0, compared=compared)
        assert RUNS[0] == (3, 3, 4)
        assert ((1, 3, 4) in RUNS) == (not compared)


def test_ops_that_pad_a_length_are_no_loop_over_it():
    class Padded(nn.Module):
        def forward(self, x):
            return torch.cat([x, x[:, :1]], 1) / len(x[0]) if len(x[0]) % 2 else x / len(x[0])

    prepared = qtk.prepare_model(Padded(), torch.randn(2, 6, 4), dynamic_shapes="all")
    assert prepared.sizes.fixed == {("x", 1): "the code reads its length as a number, or branches on it"}


class Windows(nn.Module):
    """Windows of 4 over every second element, padded to whole ones."""

    def forward(self, x):
        x = x[:, ::2]
        rest = (4 - x.shape[1] % 4) % 4
        x = nn.functional.pad(x, (0, rest)) if rest > 0 else x
        return x.view(x.shape[0], x.shape[1] // 4, 4).sum(2)


@pytest.mark.medium
def test_of_conditions_on_one_length_the_short_ones_are_told():
    model = Windows()
    prepared = qtk.prepare_model(model, torch.randn(2, 32), dynamic_shapes="all")
    assert 1 <= len(prepared.report.reasons) <= 6
    for length in range(8, 48):
        x = torch.randn(3, length)
        try:
            y = prepared(x)
        except CaptureError:
            assert (length + 1) // 2 % 4 != 0
        else:
            assert torch.equal(y, model(x))
