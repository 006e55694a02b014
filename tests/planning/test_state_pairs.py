import pytest
import torch
from torch import nn

import qtk
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
    found = leaders(Stream(nn.GRU), (X, torch.zeros(1, 2, 8)), states={"h": 1}, config="onnxruntime")
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


@pytest.mark.medium
def test_a_buffer_that_another_kind_of_call_only_reads_is_named():
    class Once(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("held", torch.zeros(2, 4))

        def forward(self, x, given=None):
            if given is None:
                return x + self.held
            self.held.copy_(given)
            return x * self.held

    x = torch.randn(2, 4)
    with pytest.warns(match="forward writes held in calls of one kind and only reads it .* or give it as an input"):
        qtk.QuantSim(Once().eval(), (x, x), variants=[(x,)])


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
    session = qtk.export.onnx.session.create_session(tmp_path / "out" / "model.onnx")[0]
    h = zero.numpy()
    simulated, error, power = zero, 0.0, 0.0
    for x in steps[50:]:
        y, h = session.run(None, {"x": x.numpy(), "h": h})
        with torch.no_grad():
            z, simulated = sim.model(x, simulated)
        error, power = error + float((z - torch.from_numpy(y)).square().sum()), power + float(z.square().sum())
    assert power > 10 ** 3.5 * error  # 35 dB
