"""Functions that are kept whole as recurrences, and functions that are not."""

import copy
import functools
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qtk
from qtk.calls.calls import Call
from qtk.capture.scans import loops_of, scans_as_ops
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


def turned(x, turns):
    """A loop of as many turns as the input is wide."""
    for _ in range(turns):
        x = x - 0.1 * torch.sin(x)
    return x


def heads(query, key):
    """A loop over the heads of an attention, which do not wait for each other, into a tensor."""
    results = torch.empty_like(query)
    for head in range(query.shape[1]):
        results[:, head] = (query[:, head] @ key[:, head].transpose(-1, -2)).softmax(-1) @ key[:, head]
    return results


def stacked(query, key):
    return torch.stack([query[:, head] * key[:, head].sigmoid() for head in range(query.shape[1])], 1)


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
            case "turned":
                y = turned(x, x.shape[-1])
            case "heads" | "stacked":
                query, key = (each.unflatten(-1, (3, 2)).transpose(1, 2) for each in (x, decay))
                y = (heads if self.kind == "heads" else stacked)(query, key).transpose(1, 2).flatten(2)
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


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["turned", "heads"])
def test_a_loop_over_heads_or_of_a_number_of_turns_is_not_kept(kind):
    _, graph = prepared(kind)
    assert not scans(graph)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["layers", "refined", "stacked", "writes"])
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


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(6, 12)

    def forward(self, frames, *, gain=1.0):
        x, decay = self.proj(frames).chunk(2, -1)
        return recurrence(x, decay.sigmoid())[0] * gain


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(6, 6)

    def steps(self, x):
        state, states = torch.zeros_like(x[:, 0]), []
        for step in range(x.shape[1]):
            state = F.dropout(state * 0.5 + x[:, step], 0.5, self.training)
            states.append(state)
        return torch.stack(states, 1)

    def forward(self, x):
        return self.steps(self.proj(x))


def test_a_method_is_asked_in_the_mode_of_the_model():
    model, x = Dropping().eval(), torch.randn(2, 5, 6)
    graph = qtk.prepare_model(model, x)
    assert len(scans(graph)) == 1
    assert not graph.report.train_notes
    for each in (graph, copy.deepcopy(graph)):
        assert (each.train()(x) == 0).any()
        assert torch.equal(each.eval()(x), model(x))
    assert not model.training


class Remembering(nn.Module):
    def __init__(self, keep):
        super().__init__()
        self.proj, self.keep, self.last, self.all = nn.Linear(6, 6), keep, torch.zeros(2, 6), []

    def steps(self, x):
        state, states = torch.zeros_like(x[:, 0]), []
        for step in range(x.shape[1]):
            state = state * 0.5 + x[:, step]
            states.append(state)
        if self.keep == "list":
            self.all.append(state)
        else:
            self.last = state
        return torch.stack(states, 1)

    def forward(self, x):
        self.all.clear()
        x = self.steps(self.proj(x))
        return x + (self.all[-1] if self.keep == "list" else self.last)[:, None]


@torch.no_grad()
@pytest.mark.parametrize("keep", ["list", "attribute"])
def test_a_method_that_sets_attributes_of_its_module_is_not_kept(keep):
    model, x = Remembering(keep).eval(), torch.randn(2, 5, 6)
    model(x)
    graph = qtk.prepare_model(model, x)
    assert not scans(graph)
    assert not graph.report.parts
    x = torch.randn(2, 5, 6)
    assert torch.equal(graph(x), model(x))


def test_inputs_keep_their_names():
    graph = qtk.prepare_model(Named().eval(), torch.randn(2, 5, 6))
    assert scans(graph)
    assert [node.name for node in graph.graph.find_nodes(op="placeholder")] == ["frames"]
    assert "__signature__" not in vars(Named.forward)
    assert "__signature__" not in vars(recurrence)


def test_another_thread_computes_while_one_traces():
    x, decay = torch.randn(2, 5, 6), torch.rand(2, 5, 6)
    model = Mixer("loop").eval()
    results, expected = [], recurrence(x, decay)[0]
    with scans_as_ops(loops_of(model, Call((x,), {}, None))), pytest.MonkeyPatch.context() as patch:
        patch.setattr("qtk.capture.scans.is_exporting", lambda: True)
        thread = threading.Thread(target=lambda: results.append(recurrence(x, decay)[0]))
        thread.start()
        thread.join()
    assert torch.equal(results[0], expected)


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


class Stream(nn.Module):
    """A recurrence that begins with the state of the call before."""

    def __init__(self):
        super().__init__()
        self.proj, self.out = nn.Linear(6, 12), nn.Linear(6, 6)

    def forward(self, x, state):
        values, gates = self.proj(x).chunk(2, -1)
        states, last = recurrence(values, torch.sigmoid(gates), start=state, with_last=True)
        return self.out(states), last


@torch.no_grad()
@pytest.mark.parametrize("batch", [2, 5, 6])
def test_a_state_is_as_many_and_as_wide_as_the_inputs(batch):
    """The tracer knows the sizes of the state by names of their own; 5 is the length, 6 the width."""
    torch.manual_seed(0)
    model = Stream().eval()
    graph = qtk.prepare_model(model, (torch.randn(batch, 5, 6), torch.randn(batch, 6)), dynamic_shapes="all")
    assert len(scans(graph)) == 1
    for other, length in ((1, 4), (3, 17)):
        inputs = torch.randn(other, length, 6), torch.randn(other, 6)
        for got, wanted in zip(graph(*inputs), model(*inputs), strict=True):
            assert torch.equal(got, wanted)


def selective_step(state, x, decay):
    """One token: writes the state, as the kernels of state-space models do."""
    new = state * torch.exp(-decay) + x
    state.copy_(new)
    return new * 2


def selective_scan(x, decay):
    """All tokens."""
    state, states = torch.zeros_like(x[:, 0]), []
    for step in range(x.shape[1]):
        state = state * torch.exp(-decay[:, step]) + x[:, step]
        states.append(state)
    return torch.stack(states, 1), state


class Selective(nn.Module):
    """A recurrence over all tokens, or one step from the state of the call before."""

    def __init__(self):
        super().__init__()
        self.proj, self.out = nn.Linear(6, 12), nn.Linear(6, 6)

    def forward(self, x, state=None):
        values, decays = self.proj(x).chunk(2, -1)
        if state is None:
            states, last = selective_scan(values, F.softplus(decays))
            return self.out(states * 2), last
        state = state.clone()
        return self.out(selective_step(state, values[:, 0], F.softplus(decays[:, 0])))[:, None], state


@torch.no_grad()
def test_one_step_is_a_scan_in_float_that_goes_on_where_all_steps_end():
    torch.manual_seed(0)
    model, x = Selective().eval(), torch.randn(3, 9, 6)
    step, whole = {"x": x[:, :1], "state": torch.randn(3, 6)}, {"x": x}
    sim = qtk.QuantSim(model, step, variants=[whole], dynamic_shapes="all", states={"state": 1})
    sim.compute_encodings([whole, step], progress=False)
    assert {each.function for each in scans(sim.model)} == {selective_scan, selective_step}
    assert "scan" in {str(site): why for site, why in sim.plan.unquantized.items()}["state:input"]
    wanted, state = sim.model(x=x)[0], sim.model(x=x[:, :4])[1]
    for token in range(4, 9):
        before = state.clone()
        result, after = sim.model(x=x[:, token:token + 1], state=state)
        assert torch.equal(state, before)
        assert (result[:, 0] - wanted[:, token]).abs().max() < 1.5 * sim.quantizers["out:out"].encoding.scale
        state = after
    assert (state - sim.model(x=x)[1]).abs().max() < 1e-5


def plain_step(state, x, decay):
    state.copy_(state * torch.exp(-decay) + x)
    return state.clone()


class Stepped(Selective):
    """From a state it goes on over one token, or over several by other code."""

    def forward(self, x, state):
        values, decays = self.proj(x).chunk(2, -1)
        if x.shape[1] == 1:
            state = state.clone()
            return self.out(plain_step(state, values[:, 0], F.softplus(decays[:, 0])))[:, None], state
        values, decays = torch.cat([state[:, None], values], 1), F.pad(F.softplus(decays), (0, 0, 1, 0))
        states, last = selective_scan(values, decays)
        return self.out(states[:, 1:]), last


@torch.no_grad()
def test_a_step_of_one_token_shares_its_sites_with_steps_of_several():
    torch.manual_seed(0)
    model, state = Stepped().eval(), torch.randn(3, 6)
    one, several = {"x": torch.randn(3, 1, 6), "state": state}, {"x": torch.randn(3, 4, 6), "state": state}
    sim = qtk.QuantSim(model, several, variants=[one], dynamic_shapes="all", states={"state": 1})
    sim.compute_encodings([several, one], progress=False)
    assert {each.function for each in scans(sim.model)} == {selective_scan, plain_step}
    assert [name for name in sim.quantizers if name.startswith("scan")] == ["scan:out[0]"]
    (result, _), (longer, _) = sim.model(one["x"], state), sim.model(one["x"].expand(-1, 2, -1), state)
    assert (result[:, 0] - longer[:, 0]).abs().max() < 1.5 * sim.quantizers["out:out"].encoding.scale


class Gated(nn.Module):
    """Two inputs of sizes of their own, in a recurrence whose result is flattened."""

    def __init__(self):
        super().__init__()
        self.first, self.gate = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x, gate):
        states, _ = recurrence(self.first(x), torch.sigmoid(self.gate(gate)))
        return states.reshape(states.shape[0], -1)


@torch.no_grad()
def test_a_batch_that_is_as_long_as_time_by_chance_stays_a_size_of_its_own():
    model = Gated().eval()
    graph = qtk.prepare_model(model, (torch.randn(4, 4, 6), torch.randn(4, 4, 6)), dynamic_shapes="all")
    assert len(scans(graph)) == 1
    x, gate = torch.randn(3, 5, 6), torch.randn(3, 5, 6)
    assert torch.equal(graph(x, gate), model(x, gate))


def returned_step(state, x, decay):
    """Returns the state itself, into which its caller writes."""
    state.copy_(state * torch.exp(-decay) + x)
    return state


class Clamped(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("state", torch.zeros(2, 6))
        self.proj = nn.Linear(6, 6)

    def forward(self, x):
        state = returned_step(self.state, x, self.proj(x).sigmoid())
        state.clamp_(-4, 4)
        return state * 1


@torch.no_grad()
def test_a_state_that_is_returned_is_no_copy():
    model = Clamped().eval()
    graph = qtk.prepare_model(copy.deepcopy(model), torch.randn(2, 6))
    for x in (torch.randn(2, 6), 20 * torch.randn(2, 6), torch.randn(2, 6)):
        assert torch.equal(graph(x), model(x))
    assert torch.equal(graph.state, model.state)


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
