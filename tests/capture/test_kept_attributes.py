import copy

import pytest
import torch
from torch import nn

import qtk
from qtk.capture.kept_attributes import noting_changes
from qtk.capture.prepared_model import PreparedGraph

X = torch.ones(1, 3)


class Keeps(nn.Module):
    """Its attributes change by the call: a number, a tensor in place, one in a list, and one that is only shown."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.calls, self.sum, self.held, self.shown = 0, torch.zeros(1, 3), [torch.zeros(1, 3)], None

    def forward(self, x):
        self.calls += 1
        self.sum.add_(x)
        self.held[0] = self.held[0] + x
        self.shown = self.linear(x)
        return self.shown + self.calls + self.sum + self.held[0]


class Shows(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.shown = None

    def forward(self, x):
        self.shown = self.linear(x)
        return self.shown.relu()


def test_what_changed_is_named():
    model = nn.Sequential(Keeps())
    changed = noting_changes(model)
    assert changed() == ()
    model(X)
    assert changed() == ("0.calls", "0.sum", "0.held", "0.shown")


@pytest.mark.medium
def test_a_state_in_no_buffer_keeps_its_python_with_the_way_out_and_is_right_call_after_call():
    model = Keeps().eval()
    prepared = qtk.prepare_model(copy.deepcopy(model), X)
    reason = prepared.report.parts[0].reason
    assert not isinstance(prepared, PreparedGraph)
    assert "is mutated in the forward" in reason or "forward keeps" in reason
    for _ in range(3):
        assert torch.allclose(model(X), prepared(X))


def test_the_reason_names_the_attribute_and_the_buffer_to_make():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.calls = nn.Linear(3, 3), 0

        def forward(self, x):
            self.calls += 1
            return self.linear(x) * self.calls

    (reason,) = [part.reason for part in qtk.prepare_model(Counts().eval(), X).report.parts if part.path == ""]
    assert "forward keeps calls from call to call" in reason
    assert "self.register_buffer('calls', " in reason


def test_an_attribute_that_no_later_call_reads_is_no_state():
    assert isinstance(qtk.prepare_model(Shows().eval(), X), PreparedGraph)
