"""Functions that are kept whole as recurrences, and functions that are not."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qtk
from qtk.nn.scan import Scan

pytestmark = pytest.mark.medium


def recurrence(x, decay, *, start=None, with_last=False):
    """A loop over time steps [B, T, D]."""
    state = torch.zeros_like(x[:, 0]) if start is None else start
    states = []
    for step in range(x.shape[1]):
        state = decay[:, step] * state + x[:, step]
        states.append(state)
    return torch.stack(states, 1), state if with_last else None


def chunked(x, log_decay, chunk: int = 4):
    """The same in closed form, in chunks: without a loop at lengths up to ``chunk``."""
    batch, steps, width = x.shape
    x, log_decay = (F.pad(each, (0, 0, 0, -steps % chunk)) for each in (x, log_decay))
    x, log_decay = (each.reshape(batch, -1, chunk, width) for each in (x, log_decay))
    sums = log_decay.cumsum(2)
    weights = (sums[:, :, :, None] - sums[:, :, None]).exp() * torch.ones(chunk, chunk).tril()[..., None]
    inside = (weights * x[:, :, None]).sum(3)
    state, outputs = torch.zeros_like(x[:, 0, 0]), []
    for number in range(x.shape[1]):
        output = inside[:, number] + sums[:, number].exp() * state[:, None]
        state = output[:, -1]
        outputs.append(output)
    return torch.cat(outputs, 1)[:, :steps]


def documented(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*args, **kwargs)

    return call


@documented
def decorated(x, decay):
    return recurrence(x, decay, with_last=True)[0]


def layers(x, weights):
    """A loop over time that multiplies with weights."""
    states = [x[:, 0]]
    for step in range(1, x.shape[1]):
        states.append(torch.tanh(F.linear(states[-1], weights)) + x[:, step])
    return torch.stack(states, 1)


def refined(x, decay):
    """A loop of a fixed number of turns."""
    for _ in range(4):
        x = x - 0.1 * torch.sin(x) * decay
    return x


def writes(x, decay):
    for step in range(1, x.shape[1]):
        x[:, step] += decay[:, step] * x[:, step - 1]
    return x * 2


class Mixer(nn.Module):
    def __init__(self, kind, width=6):
        super().__init__()
        self.kind, self.chunk = kind, 4
        self.proj, self.out = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.start = nn.Parameter(torch.randn(width))

    def steps(self, x, decay):
        return recurrence(x, decay)[0] * self.chunk

    @staticmethod
    def static(x, decay):
        return recurrence(x, decay)[0] - x

    def steps_from(self, x, decay):
        return recurrence(x, decay, start=self.start.expand(x.shape[0], -1))[0]

    def forward(self, x):
        x, decay = self.proj(x).chunk(2, -1)
        decay = decay.sigmoid()
        match self.kind:
            case "loop":
                y, last = recurrence(x, decay, with_last=True)
                y = y + last[:, None]
            case "chunked":
                y = chunked(x, decay.log(), chunk=self.chunk)
            case "method":
                y = self.steps(x, decay)
            case "static method":
                y = self.static(x, decay)
            case "decorated":
                y = decorated(x, decay=decay)
            case "layers":
                y = layers(x, self.out.weight)
            case "refined":
                y = refined(x, decay)
            case "writes":
                y = writes(x.clone(), decay)
            case "reads a parameter":
                y = self.steps_from(x, decay)
        return self.out(y)


def prepared(kind, dynamic_shapes="all", length=5):
    torch.manual_seed(0)
    model = Mixer(kind).eval()
    return model, qtk.prepare_model(model, torch.randn(2, length, 6), dynamic_shapes=dynamic_shapes)


def scans(model):
    return [module for module in model.modules() if isinstance(module, Scan)]


@torch.no_grad()
@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["loop", "chunked", "method", "static method", "decorated"])
def test_a_recurrence_is_one_op_that_serves_any_length(kind):
    model, graph = prepared(kind, length=3 if kind == "chunked" else 5)
    assert len(scans(graph)) == 1
    assert len(graph.graph.nodes) < 22
    assert ("scan", 1) in graph.report.swaps
    for batch, length in ((2, 5), (1, 1), (3, 4), (1, 17)):
        x = torch.randn(batch, length, 6)
        assert torch.equal(graph(x), model(x))
    weights = {"proj.weight", "out.weight"}
    assert weights <= {*qtk.QuantSim(graph, torch.randn(2, 5, 6)).quantizers}
    x = torch.randn(1, 7, 6)
    assert torch.equal(copy.deepcopy(graph)(x), model(x))


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["layers", "refined", "writes"])
def test_what_holds_weights_has_a_fixed_number_of_turns_or_writes_is_not_kept(kind):
    _, graph = prepared(kind)
    assert not scans(graph)


@torch.no_grad()
def test_a_method_that_reads_a_parameter_is_not_kept_but_what_it_calls():
    model, graph = prepared("reads a parameter")
    (scan,) = scans(graph)
    assert scan.function is recurrence
    x = torch.randn(3, 9, 6)
    assert torch.equal(graph(x), model(x))


@torch.no_grad()
def test_a_fixed_length_makes_no_difference():
    model, graph = prepared("loop", "batch")
    assert len(scans(graph)) == 1
    x = torch.randn(4, 5, 6)
    assert torch.equal(graph(x), model(x))


def test_the_functions_of_the_model_are_as_they_were():
    before = recurrence.__code__
    prepared("loop")
    assert recurrence.__code__ is before


def test_gradients_pass_through_a_recurrence():
    model, graph = prepared("loop", "batch")
    x = torch.randn(2, 5, 6)
    wanted = torch.autograd.grad(model(x).square().sum(), model.proj.weight)[0]
    assert torch.equal(torch.autograd.grad(graph(x).square().sum(), graph.proj.weight)[0], wanted)


@torch.no_grad()
def test_a_scan_and_what_it_reads_stay_in_float_and_say_so():
    _, graph = prepared("loop")
    sim = qtk.QuantSim(graph, torch.randn(2, 5, 6))
    sim.compute_encodings([torch.randn(4, 5, 6)])
    reasons = {str(site): reason for site, reason in sim.plan.unquantized.items()}
    assert "read by scan, a scan over time, which is one op in float" in reasons["proj:out"]
    assert "read by scan" in reasons["sigmoid:out"]
    assert {"proj.weight", "out.weight", "scan:out[0]"} <= {*sim.quantizers}  # an op of integers reads the result


class Positions(nn.Module):
    """Sums of its own, as of position ids, and no recurrence; called by names too."""

    def forward(self, hidden, *, mask=None):
        return hidden if mask is None else hidden * mask.cumsum(1)[..., None]


@pytest.mark.parametrize("wrapped", [False, True])
def test_inputs_of_code_with_sums_keep_their_names(wrapped):
    kind = Positions
    if wrapped:
        kind = type("Wrapped", (nn.Module,), {"forward": documented(lambda self, hidden: hidden.cumsum(1))})
    before = vars(kind.forward).copy()
    prepared = qtk.prepare_model(kind().eval(), torch.randn(2, 3, 4))
    assert [node.name for node in prepared.graph.find_nodes(op="placeholder")] == ["hidden"]
    assert prepared(hidden=torch.zeros(2, 3, 4)).shape == (2, 3, 4)
    assert vars(kind.forward) == before
