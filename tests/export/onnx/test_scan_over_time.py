"""Recurrent nets as Scan: the file, in ONNX Runtime and in onnx's evaluator, against the simulation's loop."""

from collections import Counter

import numpy as np
import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import qtk
from qtk.errors import ExportError
from qtk.export.onnx.qdq import compare_with_simulation, export
from qtk.export.onnx.stored_sites import stored_sites
from tests.capture import recurrent_nets
from tests.capture.recurrent_nets import Cell, case, simulated
from tests.export.onnx.simulated import run_onnx, run_simulation
from tests.zoo import packed
from tests.zoo.prepared import slow_but

I, H, P = 5, 6, 3  # noqa: E741
NETS = {
    "lstm": lambda: nn.LSTM(I, H, 2, batch_first=True),
    "lstm_both": lambda: nn.LSTM(I, H, 2, bidirectional=True, batch_first=True),
    "lstm_projected": lambda: nn.LSTM(I, H, proj_size=P),
    "gru": lambda: nn.GRU(I, H, 2),
    "gru_both": lambda: nn.GRU(I, H, bidirectional=True, bias=False, batch_first=True),
    "rnn_tanh": lambda: nn.RNN(I, H, bias=False),
    "rnn_relu_both": lambda: nn.RNN(I, H, bidirectional=True, nonlinearity="relu"),
}


class Started(nn.Module):
    """A net whose first states are inputs."""

    def __init__(self):
        super().__init__()
        self.net = nn.LSTM(I, H, bidirectional=True)

    def forward(self, x, hidden, cell):
        output, (hidden, cell) = self.net(x, (hidden, cell))
        return output, hidden, cell


def quantized(model, *inputs, **options):
    """A simulation whose sequences may have any length and number."""
    torch.manual_seed(0)
    prepared = qtk.prepare_model(model.eval(), inputs, dynamic_shapes="all", verify=False)
    sim = qtk.QuantSim(prepared, inputs, **options)
    sim.compute_encodings([inputs])
    return sim


def written(sim, path, *inputs):
    export(sim.model, inputs, path)
    compare_with_simulation(path, sim.model)
    return path


def operators(graph):
    """How often each operator occurs, subgraphs included."""
    counts = Counter()
    for node in graph.node:
        counts[node.op_type] += 1
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                counts += operators(attribute.g)
    return counts


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("name", slow_but(NETS, "gru", "lstm_both"))
def test_the_file_computes_the_simulation_at_any_length(name, tmp_path):
    torch.manual_seed(1)
    net = NETS[name]()
    sim = quantized(net, torch.randn(7, 4, I))
    path = written(sim, tmp_path / "model.onnx", torch.randn(7, 4, I))
    steps = net.num_layers * (2 if net.bidirectional else 1)
    assert operators(onnx.load(path).graph)["Scan"] == steps
    for shape in ((7, 4, I), (3, 2, I), (12, 1, I), (1, 9, I)):
        x = torch.randn(shape)
        expected = run_simulation(sim.model, x)
        for found in (run_onnx(path, x), ReferenceEvaluator(str(path)).run(None, {"input": x.numpy()})):
            assert_near(found, expected, sim)


def assert_near(found, expected, sim):
    """Equal, but for a value on a tie that another order of summation moved by one code."""
    largest = max(float(each.scale.max()) for each in sim.quantizers.values() if each.scale.numel() == 1)
    for theirs, ours in zip(found, expected, strict=True):
        assert theirs.shape == ours.shape
        difference = np.abs(theirs - ours)
        assert (difference > 1e-5).mean() <= 0.02
        assert difference.max() <= 1.001 * largest


@pytest.mark.sample(1)
@pytest.mark.medium
def test_first_states_that_are_inputs(tmp_path):
    inputs = torch.randn(4, 3, I), torch.randn(2, 3, H), torch.randn(2, 3, H)
    sim = quantized(Started(), *inputs)
    path = written(sim, tmp_path / "model.onnx", *inputs)
    other = torch.randn(6, 2, I), torch.randn(2, 2, H), torch.randn(2, 2, H)
    assert_near(run_onnx(path, *other), run_simulation(sim.model, *other), sim)


@pytest.mark.slow
def test_every_site_is_found_under_its_name(tmp_path):
    x = torch.randn(4, 3, I)
    sim = quantized(nn.Sequential(NETS["lstm_both"]()), x)
    path = written(sim, tmp_path / "model.onnx", x)
    stored = {site.name: site for site in stored_sites(path)}
    assert {"0.l0.cell.hidden:out", "0.l1_reverse.cell.forget_gate:out", "0.weight_hh_l1_reverse"} <= set(stored)
    assert all(stored[name].encoding.equals(encoding) for name, encoding in sim.encodings().items())
    bodies = [attribute.g for node in onnx.load(path).graph.node for attribute in node.attribute if attribute.g.node]
    names = {value for body in bodies for node in body.node for value in node.output}
    assert {f"0.l1.cell.{op}:out" for op in ("gates", "cell_tanh", "hidden")} <= names


@pytest.mark.slow
def test_the_file_does_not_grow_with_the_length(tmp_path):
    counts = []
    for length in (3, 40):
        x = torch.randn(2, length, I)
        sim = quantized(NETS["lstm"](), x)
        counts.append(operators(onnx.load(written(sim, tmp_path / f"{length}.onnx", x)).graph))
    assert counts[0] == counts[1]
    assert sum(counts[0].values()) <= 300


@pytest.mark.medium
def test_a_net_that_is_not_quantized_stays_one_operator(tmp_path):
    x = torch.randn(3, 4, I)
    sim = quantized(nn.Sequential(nn.Linear(I, I), NETS["lstm"]()), x, activation_bits=None)
    for name, quantizer in sim.quantizers.items():
        if not name.startswith("0."):
            quantizer.mode = qtk.Mode.BYPASS
    path = tmp_path / "model.onnx"
    export(sim.model, x, path)
    assert operators(onnx.load(path).graph)["LSTM"] == 2
    other = torch.randn(5, 9, I)
    for found, expected in zip(run_onnx(path, other), run_simulation(sim.model, other), strict=True):
        assert np.abs(found - expected).max() < 1e-5


@pytest.mark.sample(1)
@pytest.mark.slow
def test_an_island_on_packed_sequences_of_any_lengths(tmp_path):
    torch.manual_seed(0)
    inputs = packed.sequences(4)
    sim = qtk.QuantSim(packed.InPython().eval(), inputs)
    sim.compute_encodings([inputs])
    sim.export(tmp_path / "out", formats=("onnx",))
    assert operators(onnx.load(tmp_path / "out" / "rnn.onnx").graph)["Scan"] == 2
    lengths = ([5, 3, 1, 4], [2, 5, 5], [3], [1, 1, 1, 1, 1])
    data = [packed.sequences(lengths=each, seed=1) for each in lengths]
    exact = sim.verify_export(tmp_path / "out", data, turns=0).exact
    assert exact.differing <= 0.02
    sequence = pack_padded_sequence(torch.randn(3, 5, 4), torch.tensor([5, 4, 2]), batch_first=True)
    states = torch.zeros(2, 3, 6), torch.zeros(2, 3, 6)
    found = run_onnx(tmp_path / "out" / "rnn.onnx", sequence.data, sequence.batch_sizes, *states)
    with torch.no_grad():
        output, last = sim.model.rnn(sequence)
    for theirs, ours in zip(found, (output.data, *last), strict=True):
        assert np.abs(theirs - ours.numpy()).max() <= 0.02  # one code


@pytest.mark.medium
def test_ranges_taken_over_padding_are_refused_with_the_site(tmp_path):
    inputs = packed.sequences(4)
    config = {"version": 1, "defaults": {"activation": {"symmetric": False, "dynamic": True}}}
    sim = qtk.QuantSim(packed.ToTotalLength().eval(), inputs, config=config)
    sim.compute_encodings([inputs])
    with pytest.raises(ExportError, match=r"rnn\.l0\.\S+: packed sequences are padded in ONNX"):
        sim.export(tmp_path / "out", formats=("onnx",))
    assert not (tmp_path / "out").exists()


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize(("kind", "option"), [
    (nn.GRU, "both_ways"), (nn.LSTM, "projected"),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        (nn.LSTM, "plain"), (nn.GRU, "two_layers"), (nn.RNN, "both_ways"),
    )),
])
def test_the_exported_steps_compute_the_bits_of_the_simulation(kind, option, tmp_path):
    _, prepared, x = case(kind, option)
    sim = simulated(prepared, x)
    sim.export(tmp_path / "out", formats=("onnx",))
    torch.manual_seed(2)
    exact = sim.verify_export(tmp_path / "out", [x, torch.randn_like(x)], turns=0).exact
    assert exact.differing == 0.0


@pytest.mark.medium
@pytest.mark.parametrize("kind", [
    nn.LSTMCell, *(pytest.param(kind, marks=pytest.mark.slow) for kind in (nn.GRUCell, nn.RNNCell)),
])  # the zoo exports all three
def test_an_exported_cell_computes_the_bits_of_the_simulation(kind, tmp_path):
    torch.manual_seed(0)
    rows, features, states = recurrent_nets.N, recurrent_nets.I, recurrent_nets.H
    x, start = torch.randn(rows, features), [torch.randn(rows, states) for _ in range(2 if kind is nn.LSTMCell else 1)]
    inputs = (x, *start)
    sim = simulated(Cell(kind).eval(), inputs)
    sim.export(tmp_path / "out", formats=("onnx",))
    assert sim.verify_export(tmp_path / "out", [inputs], turns=0).exact.differing == 0.0
