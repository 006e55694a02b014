"""Markers and indices among quantized inputs, against the float model: the numbers that were passed decide."""

import pytest
import torch
from torch import nn

import qtk
from qtk.graph.insert import insert, remove
from qtk.runtimes.session import create_session


class Marked(nn.Module):
    """A net that returns what it reads of an input, and the rest of it with the others through a layer."""

    def __init__(self, read):
        super().__init__()
        torch.manual_seed(0)
        self.read, self.linear, self.table = read, nn.Linear(8, 8), nn.Embedding(50, 8)

    def forward(self, x):
        return self.read(self, x)


READS = {
    "equal": lambda model, x: (x == -1, model.linear(torch.where(x == -1, 0.0, x))),
    "not a number of a moved input": lambda model, x: (
        x.transpose(0, 1) > 0.4, model.linear(x.transpose(0, 1).transpose(0, 1).contiguous())),
    "moved twice for both": lambda model, x: (
        (moved := x.reshape(x.shape[0], 2, 4).transpose(1, 2)) == -1, model.linear(moved.reshape(x.shape[0], 8))),
    "index": lambda model, x: ((ids := (x[:, 0].abs() * 10).long()), model.linear(x) + model.table(ids)),
    "bucket": lambda model, x: (torch.bucketize(3 * x[:, 0] - x[:, 1], torch.linspace(-2, 2, 9)), model.linear(x)),
    "index of a column": lambda model, x: (x[:, 1].long(), model.linear(x) + model.table(x[:, 1].abs().long())),
    "largest": lambda model, x: (x >= x.topk(3, 1).values[:, -1:], model.linear(x)),
    "index of the largest": lambda model, x: (x.max(1).indices, model.linear(x)),
    "one of several parts": lambda model, x: (
        (parts := x.split([2, 6], 1))[0] == -1, model.linear(torch.cat([parts[1], parts[0]], 1))),
    "finite": lambda model, x: (x.isfinite() & x.ne(-1), model.linear(x.masked_fill(x < -0.7, 0.0))),
}


def marked(seed=0):
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(seed))
    x[::3, 2] = -1.0
    return x


def calibrated(read, config="default"):
    sim = qtk.QuantSim(Marked(READS[read]).eval(), marked(), config=config)
    sim.compute_encodings([marked(seed) for seed in range(3)], progress=False)
    return sim


@pytest.mark.parametrize("read", READS)
def test_what_is_no_real_number_is_decided_by_the_input_itself(read):
    sim, x = calibrated(read), marked(9)
    expected, (decided, _) = READS[read](Marked(READS[read]), x)[0], sim.model(x)
    torch.testing.assert_close(decided, expected, rtol=0, atol=0)


def test_both_sides_of_a_comparison_are_rounded_or_neither():
    sim, x = qtk.QuantSim(Marked(lambda model, x: (x >= x.sigmoid(), model.linear(x))).eval(), marked()), marked(9)
    sim.compute_encodings([marked(seed) for seed in range(3)], progress=False)
    rounded = sim.quantizers["x:input"](x)
    expected = rounded >= sim.quantizers["sigmoid:out"](rounded.sigmoid())
    torch.testing.assert_close(sim.model(x)[0], expected, rtol=0, atol=0)


def test_dropout_of_an_input_is_drawn_once():
    model = Marked(lambda model, x: ((y := nn.functional.dropout(x, 0.5, model.training)) == 0, model.linear(y)))
    nn.init.eye_(model.linear.weight)
    nn.init.zeros_(model.linear.bias)
    sim = qtk.QuantSim(model.train(), marked())
    sim.compute_encodings([marked()], progress=False)
    is_zero, values = sim.model.train()(marked(9))
    assert 0.3 < is_zero.float().mean() < 0.7
    torch.testing.assert_close(is_zero, values == 0, rtol=0, atol=0)


@pytest.mark.parametrize("read", READS)
def test_removing_the_quantizers_restores_the_graph(read):
    prepared = qtk.prepare_model(Marked(READS[read]).eval(), marked())
    sim = qtk.QuantSim(prepared, marked())
    plan, model = sim.plan, sim.model
    remove(model)
    assert model.code == prepared.code
    insert(model, plan)
    remove(model)
    assert [str(node) for node in model.graph.nodes] == [str(node) for node in prepared.graph.nodes]


@pytest.mark.parametrize("read", ["equal", "moved twice for both", "bucket", "finite"])
@pytest.mark.parametrize("config", ["default", "onnxruntime"])
def test_files_decide_as_the_simulation(read, config, tmp_path):
    sim, x = calibrated(read, config), marked(9)
    sim.export(tmp_path, formats=("onnx",), progress=False)
    (file,) = tmp_path.glob("*.onnx")
    session, _ = create_session(file)
    decided, values = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    expected = sim.model(x)
    torch.testing.assert_close(torch.from_numpy(decided), expected[0], rtol=0, atol=0)
    is_other = (torch.from_numpy(values) - expected[1].detach()).abs() > 1e-4
    assert is_other.float().mean() <= 0.01  # sums at half a step
