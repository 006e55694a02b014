import copy
import functools

import pytest
import torch
from torch import nn

import qtk
from qtk.data.forward_pass import outputs
from tests.zoo.streams import frames, stream

X = torch.randn(3, 2, 4)


class Stream(nn.Module):
    def __init__(self, kind, layers=1):
        super().__init__()
        self.net = kind(4, 8, layers)

    def forward(self, x, h, c=None):
        y, states = self.net(x, h if c is None else (h, c))
        return y, states if c is None else states[0], *(() if c is None else states[1:])


def leaders(model, inputs, **options):
    plan = qtk.QuantSim(model.eval(), inputs, **options).plan
    return {site.name: None if decided.leader is None else decided.leader.name for site, decided in plan.items()}


@pytest.mark.medium
def test_a_state_has_the_encoding_of_the_value_inside_the_net_that_it_takes():
    zero = torch.zeros(1, 2, 8)
    found = leaders(Stream(nn.LSTM), (X, zero, zero), states={"h": 1, "c": 2})
    assert found["h:input"] == "net.l0.cell.hidden:out"
    assert found["c:input"] == "net.l0.cell.cell.addcmul:out"


@pytest.mark.medium
def test_a_state_of_several_layers_shares_one_encoding_with_all():
    found = leaders(Stream(nn.GRU, 2), (X, torch.zeros(2, 2, 8)), states={"h": 1})
    assert found["h:input"] == found["net.l1.cell.hidden:out"] == "net.l0.cell.hidden:out"


@pytest.mark.medium
def test_where_the_net_is_float_inside_its_output_is_the_other_end():
    config = {"version": 1, "rules": [{"match": {"op": "gru"}, "inside": "float"}]}
    found = leaders(Stream(nn.GRU), (X, torch.zeros(1, 2, 8)), states={"h": 1}, config=config)
    assert found["h:input"] == "net:out[1]"


def test_a_state_of_written_out_code():
    class Average(nn.Module):
        def forward(self, x, mean):
            mean = 0.9 * mean + 0.1 * x
            return x - mean, mean

    x = torch.randn(2, 4)
    found = leaders(Average(), (x, x), states={"mean": 1})
    assert found["mean:input"] == next(name for name in found if name.startswith("add"))


def test_an_input_of_another_width_takes_that_of_its_output_with_all_that_share_it():
    class Average(nn.Module):
        def forward(self, x, mean):
            mean = 0.9 * mean + 0.1 * x
            return torch.cat([x - mean, mean], 1) * 2, mean

    rules = [{"match": {"op": "add"}, "output": {"bits": 16}}]
    x = torch.randn(2, 4)
    plan = qtk.QuantSim(Average(), (x, x), states={"mean": 1}, config={"version": 1, "rules": rules}).plan
    widths = {site.name: decided.spec.dtype.bits for site, decided in plan.items()}
    assert widths["mean:input"] == widths["add:out"] == 16
    assert all(decided.leader is None or plan[decided.leader].leader is None for decided in plan.values())


@pytest.mark.sample(2)
@pytest.mark.medium
@pytest.mark.parametrize(("name", "site", "leader"), [
    ("cached_conv", "past:input", "concat:out"),
    ("streams", "recurrent.h:input", "recurrent.cell.step.cell.hidden:out"),
    pytest.param("average", "mean:input", "add:out", marks=pytest.mark.medium),
    pytest.param("key_value_cache", "keys:input", "index_put:out", marks=pytest.mark.medium),
])
def test_a_buffer_that_forward_writes_has_the_encoding_of_the_value_that_it_takes(name, site, leader):
    plan = qtk.QuantSim(stream(name), frames(name, 1)[0]).plan
    (decided,) = [decided for each, decided in plan.items() if each.name == site]
    assert decided.leader.name == leader
    assert not decided.static


class Memory(nn.Module):
    """One kind of call writes what the other reads."""

    def __init__(self):
        super().__init__()
        self.register_buffer("held", torch.zeros(2, 4))
        self.fc = nn.Linear(4, 4)

    def forward(self, x, given=None):
        if given is None:
            return self.fc(x) + self.held
        self.held.copy_(given * 2)
        return self.fc(x) * 1.5


def calibrated_memory(example, variant):
    torch.manual_seed(0)
    model, x = Memory().eval(), torch.randn(8, 2, 4)
    sim = qtk.QuantSim(model, example(x), variants=[variant(x)])
    sim.compute_encodings([batch for each in x for batch in ((each, each * 3), (each,))], progress=False)
    return model, sim, x


READS, WRITES = (lambda x: (x[0],)), (lambda x: (x[0], x[0]))


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize(("example", "variant"), [(READS, WRITES), (WRITES, READS)])
def test_a_buffer_that_one_kind_of_call_writes_is_a_state_of_the_other(example, variant):
    model, sim, x = calibrated_memory(example, variant)
    noise = power = 0.0
    for each in x:
        with torch.no_grad():
            for net in (model, sim.model):
                net(each, each * 3)
            expected, found = model(each), sim.model(each)
        torch.testing.assert_close(sim.model.held, model.held, atol=0.1, rtol=0)
        noise, power = noise + float((found - expected).square().sum()), power + float(expected.square().sum())
    assert power > 10 ** 3.5 * noise  # 35 dB; 1 with the range of the first values
    decided = {site.name: each for site, each in sim.plan.items()}
    assert decided["held:input"].leader.name == "mul:out"
    assert "held" not in decided


@pytest.mark.medium
def test_a_count_of_calls_that_another_kind_of_call_reads_stays_in_float():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x, given=None):
            if given is None:
                return x * 2 + self.calls
            self.calls += 1
            return x * given

    x = torch.randn(2, 4)
    for example, variant in (((x,), (x, x)), ((x, x), (x,))):
        plan = qtk.QuantSim(Counting().eval(), example, variants=[variant]).plan
        assert not [site.name for site in plan if site.name.startswith("calls")]


@pytest.mark.medium
def test_the_file_of_the_call_that_reads_takes_the_buffer(tmp_path):
    _, sim, x = calibrated_memory(READS, WRITES)
    sim.export(tmp_path / "out", formats=("onnx",))
    session = qtk.runtimes.session.create_session(tmp_path / "out" / "model.onnx", optimized=False)[0]
    with torch.no_grad():
        sim.model(x[1], x[1] * 3)
        held, expected = sim.model.held.clone(), sim.model(x[2])
    found, after = session.run(None, {"x": x[2].numpy(), "held": held.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), expected)
    torch.testing.assert_close(torch.from_numpy(after), held)


@pytest.mark.medium
def test_a_stream_calibrated_from_zeros_keeps_its_accuracy_and_its_file_runs_the_loop(tmp_path):
    class Denoiser(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = nn.GRUCell(16, 32), nn.Linear(32, 16)

        def forward(self, x, h):
            h = self.cell(x, h)
            return self.head(h), h

    torch.manual_seed(0)
    model, steps, zero = Denoiser().eval(), torch.randn(160, 8, 16), torch.zeros(8, 32)
    sim = qtk.QuantSim(model, (steps[0], zero), states={"h": 1})
    sim.compute_encodings([(x, zero) for x in steps[:50]], progress=False)
    drift = sim.drift([(x, zero) for x in steps[50:]], progress=False)
    assert sum(drift.sqnr_db) / len(drift.sqnr_db) > 36  # 8 dB with the range of the zeros
    sim.export(tmp_path / "out", formats=("onnx",))
    session = qtk.runtimes.session.create_session(tmp_path / "out" / "model.onnx")[0]
    h = zero.numpy()
    simulated, error, power = zero, 0.0, 0.0
    for x in steps[50:]:
        y, h = session.run(None, {"x": x.numpy(), "h": h})
        with torch.no_grad():
            z, simulated = sim.model(x, simulated)
        error, power = error + float((z - torch.from_numpy(y)).square().sum()), power + float(z.square().sum())
    assert power > 10 ** 3.5 * error  # 35 dB


class Decoder(nn.Module):
    """Attends to keys that it keeps, [batch, heads, length, width], and to a memory that stays as it is."""

    def __init__(self, write):
        super().__init__()
        self.query, self.key, self.write = nn.Linear(6, 6), nn.Linear(6, 6), write

    def forward(self, x, at, past, memory):
        query, key = (each(x).view(x.shape[0], -1, 2, 3).transpose(1, 2) for each in (self.query, self.key))
        past = self.write(past, key, at)
        return (query @ past.transpose(2, 3)).softmax(-1) @ past + query @ memory @ memory.transpose(2, 3), past, memory


def appended(past, key, at):
    return torch.cat([past, key], 2)


def written(past, key, at):
    return past.index_copy(2, at, key)


@functools.cache
def prepared(write):
    torch.manual_seed(0)
    inputs = torch.randn(2, 3, 6), torch.arange(3), torch.randn(2, 2, 8, 3), torch.randn(2, 2, 3, 3)
    return qtk.prepare_model(Decoder(write).eval(), inputs, dynamic_shapes="all"), inputs


def returned_by(write, length, output):
    """The simulation, and what it returns of its states at each of 64 steps, from ``length`` entries of 0 on."""
    model, inputs = prepared(write)
    rules = [{"match": {"op": ["concat", "scatter"]}, "output": output}]
    sim = qtk.QuantSim(copy.deepcopy(model), inputs, states={"past": 1, "memory": 2},
                       config={"version": 1, "rules": rules})
    generator = torch.Generator().manual_seed(0)
    first = torch.zeros(2, 2, length, 3), torch.randn(2, 2, 3, 3, generator=generator)
    batches = [(x, torch.tensor([at]), *first) for at, x in enumerate(torch.randn(64, 2, 1, 6, generator=generator))]
    sim.compute_encodings(batches, progress=False)
    return sim, [(past, memory) for _, past, memory in outputs(sim.model, batches)]


AXIS = {"granularity": "per_channel", "axis": 1}


@pytest.mark.sample(2)
@pytest.mark.medium
@pytest.mark.parametrize("output", [
    {"bits": 8}, {"bits": 8, "symmetric": True, **AXIS}, {"dtype": "fp8_e4m3"}, {"dtype": "fp8_e4m3", **AXIS},
])
def test_an_entry_of_a_cache_is_rounded_once_however_many_steps_follow(output):
    sim, returned = returned_by(appended, 0, output)
    last, memory = returned[-1]
    assert last.shape[2] == 64
    assert all(torch.equal(past, last[:, :, :past.shape[2]]) for past, _ in returned)
    assert all(torch.equal(each, memory) for _, each in returned)
    assert sim.quantizers["past:input"] is sim.quantizers["concat:out"]


@pytest.mark.medium
@pytest.mark.parametrize("output", [{"bits": 8}, {"bits": 8, "symmetric": True, **AXIS}])
def test_what_is_written_into_a_cache_of_a_fixed_length_shares_its_encoding(output):
    sim, returned = returned_by(written, 64, output)
    last, _ = returned[-1]
    assert all(torch.equal(past[:, :, :at + 1], last[:, :, :at + 1]) and not past[:, :, at + 1:].any()
               for at, (past, _) in enumerate(returned))
    assert sim.quantizers["past:input"] is sim.quantizers["scatter_index:out"]
