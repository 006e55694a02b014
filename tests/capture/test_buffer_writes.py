"""Captured graphs with buffers that forward writes, against eager over several calls."""

import copy

import pytest
import torch
from torch import fx, nn

import qtk
from qtk.capture.buffer_writes import detach_writes
from qtk.capture.prepared_model import PreparedGraph
from qtk.graph.written_buffers import READ, WRITE
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


@pytest.mark.sample(4)
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


class Averaged(nn.Module):
    """An input less its running mean, by its running deviation."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 4)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("square", torch.ones(3))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        self.square.mul_(0.9).add_(0.1 * (x - self.mean).square().mean(0))
        return self.fc((x - self.mean) / (self.square + 1e-3).sqrt())


class BatchNormOfOwn(Averaged):
    """As a batch norm: the statistics of the batch in training, which are differentiated, and running ones."""

    def forward(self, x):
        x = self.fc(x)[:, :3]
        mean, square = x.mean(0), x.var(0)
        with torch.no_grad():
            self.mean.lerp_(mean, 0.1)
            self.square.lerp_(square, 0.1)
        return (x - self.mean) / (square + 1e-3).sqrt()


class Leaky(Averaged):
    """A state without parameters that goes on into one with: a chain of states."""

    def forward(self, x):
        self.square = torch.tanh(0.5 * self.square + self.mean)
        self.mean = 0.5 * self.mean + x.mean(0)
        return self.fc(x + self.square)


@pytest.mark.sample(2)
@pytest.mark.medium
@pytest.mark.parametrize("kind", [Averaged, BatchNormOfOwn, Leaky])
def test_states_keep_no_graph_where_ranges_are_learned(kind):
    torch.manual_seed(0)
    batches, model = torch.randn(3, 8, 3), kind().eval()
    held = []
    for learns in (False, True):
        sim = qtk.QuantSim(copy.deepcopy(model), batches[0])
        sim.compute_encodings(batches, progress=False)
        if learns:
            sim.learn_ranges()
        sim.model.train()
        for x in batches:
            sim.model(x).square().sum().backward()
            assert not any(buffer.requires_grad for buffer in sim.model.buffers())
        assert all(each.grad.isfinite().all() for each in sim.model.parameters() if each.grad is not None)
        held.append([sim.model.mean.clone(), sim.model.square.clone()])
    for fixed, learned in zip(*held, strict=True):
        assert torch.equal(fixed, learned)


@pytest.mark.medium
@pytest.mark.parametrize("frozen", [False, True])
def test_a_loss_over_several_calls_passes_through_states_with_parameters(frozen):
    torch.manual_seed(0)
    model, frames = ReturnsTheNew().eval().requires_grad_(not frozen), torch.randn(3, 2, 3)
    prepared = qtk.prepare_model(copy.deepcopy(model), frames[0])
    gradients = []
    for module in (model, prepared):
        module.requires_grad_()
        sum(module(x).square().sum() for x in frames).backward()
        gradients.append(module.linear.weight.grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("inputs_carry", [False, True])
def test_inputs_that_other_modules_compute_keep_gradients(inputs_carry):
    root, graph = nn.Module(), fx.Graph()
    root.register_buffer("mean", torch.zeros(3))
    held, x = graph.get_attr("mean"), graph.placeholder("x")
    value = graph.call_function(torch.ops.aten.add.Tensor, (graph.call_function(READ, (held,)), x))
    write = graph.call_function(WRITE, (held, value))
    graph.output((value,))
    detach_writes(graph, root, inputs_carry=inputs_carry)
    assert (write.args[1] is value) is inputs_carry
    assert graph.output_node().args[0] == (value,)
    before = len(graph.nodes)
    detach_writes(graph, root, inputs_carry=inputs_carry)
    assert len(graph.nodes) == before
