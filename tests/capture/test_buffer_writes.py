"""Captured graphs with buffers that forward writes, against eager over several calls."""

import copy

import pytest
import torch
from torch import nn

import qtk
from qtk.capture.prepared_model import PreparedGraph
from tests.zoo.streams import STREAMS, frames, stream


class Holds(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("h", torch.zeros(2, 3))


class ReturnsTheOld(Holds):
    def forward(self, x):
        old = self.h
        self.h = self.linear(x) + 0.5 * old
        return old, old[:, :2]


class ReturnsTheNew(Holds):
    def forward(self, x):
        self.h = self.linear(x) + 0.5 * self.h
        return self.h


class ReadsTheOldAgain(Holds):
    def forward(self, x):
        old = self.h
        self.h = self.linear(x)
        return self.h - old


class CalledTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = ReturnsTheNew()

    def forward(self, x):
        return self.inner(self.inner(x))


class Delay(nn.Module):
    """Each buffer takes what the other has."""

    def __init__(self):
        super().__init__()
        self.register_buffer("now", torch.zeros(2, 3))
        self.register_buffer("before", torch.zeros(2, 3))

    def forward(self, x):
        y = x + self.now - 2 * self.before
        self.before.copy_(self.now)
        self.now.copy_(x)
        return y, self.before[:, :2]


def assert_equal_over_calls(model, batches):
    prepared, eager = qtk.prepare_model(copy.deepcopy(model), batches[0]), copy.deepcopy(model)
    assert isinstance(prepared, PreparedGraph), prepared.report
    returned = []
    with torch.no_grad():
        for batch in batches:
            expected = torch.utils._pytree.tree_leaves(eager(*batch))
            found = torch.utils._pytree.tree_leaves(prepared(*batch))
            copies = [value.clone() for value in found]
            assert all(torch.allclose(*pair, atol=1e-6) for pair in zip(expected, found, strict=True))
            returned.append((found, copies))
    assert all(torch.equal(*pair) for found, copies in returned for pair in zip(found, copies, strict=True)), \
        "a later call changed what was returned"


class HoldsTheInput(Holds):
    """Remembers what it was given, as a streaming convolution does."""

    def forward(self, x):
        y = self.linear(x + self.h)
        self.h = x
        return y


class HoldsABuffer(Holds):
    def __init__(self):
        super().__init__()
        self.register_buffer("start", torch.ones(2, 3))

    def forward(self, x):
        y = self.linear(x + self.h)
        self.h = self.start
        return y


@pytest.mark.medium
@pytest.mark.parametrize(
    "kind", [ReturnsTheOld, ReturnsTheNew, ReadsTheOldAgain, CalledTwice, Delay, HoldsTheInput, HoldsABuffer]
)
def test_a_graph_writes_what_forward_writes(kind):
    torch.manual_seed(0)
    assert_equal_over_calls(kind().eval(), [(torch.randn(2, 3),) for _ in range(4)])


@pytest.mark.medium
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[] if name == "streams" else pytest.mark.slow) for name in STREAMS])
def test_streams_are_one_graph(name):
    assert_equal_over_calls(stream(name), frames(name, 4))
