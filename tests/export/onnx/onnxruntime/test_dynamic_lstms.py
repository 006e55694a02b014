"""DynamicQuantizeLSTM: the file against the formulas of the kernel, against the simulation, and read back."""

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

import qtk
from qtk.export.onnx.onnxruntime.dynamic_lstms import GATES, TORCH_GATES
from qtk.export.onnx.stored_sites import stored_sites
from qtk.runtimes.saturation import saturating_weights
from qtk.runtimes.session import Optimizations, session_with
from qtk.runtimes.site_outputs import site_outputs
from tests.exported_files import leave_out

I, H, N, T = 7, 12, 3, 9  # noqa: E741


class Started(nn.Module):
    """Two layers in both directions, whose states are inputs and outputs."""

    def __init__(self, bias=True):
        super().__init__()
        self.lstm = nn.LSTM(I, H, 2, bidirectional=True, batch_first=True, bias=bias)

    def forward(self, x, h, c):
        y, (h, c) = self.lstm(x, (h, c))
        return y, h, c


def inputs(batch=N, length=T):
    torch.manual_seed(batch)
    return torch.randn(batch, length, I), torch.randn(4, batch, H) * 0.3, torch.randn(4, batch, H) * 0.3


def exported(model, given, folder, config="onnxruntime"):
    torch.manual_seed(0)
    prepared = qtk.prepare_model(model.eval(), given, dynamic_shapes="all", verify=False)
    sim = qtk.QuantSim(prepared, given, config=config)
    sim.compute_encodings([given], progress=False)
    sim.export(folder, formats=("onnx",))
    return sim


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lstm") / "out"
    return exported(Started(), inputs(), folder), folder / "model.onnx"


def run(file, given, *, optimizations=Optimizations.ON, threads=1):
    session, _ = session_with(file, optimizations, threads=threads)
    return session.run(None, {port.name: each.numpy() for port, each in zip(session.get_inputs(), given, strict=True)})


def sqnr_db(found, expected):
    noise = np.square(np.float64(found) - expected).sum()
    return 10 * np.log10(np.square(np.float64(expected)).sum() / noise) if noise else np.inf


def dynamic(x):
    """Scale, and codes minus zero point, of DynamicQuantizeLinear."""
    low, high = min(x.min(), np.float32(0)), max(x.max(), np.float32(0))
    scale = np.float32((high - low) / np.float32(255))
    zero = np.clip(np.rint(-low / scale), 0, 255)
    return scale, (np.clip(np.rint(x / scale) + zero, 0, 255) - zero).astype(np.int64)


def kernel(x, h, c, w, r, w_scale, r_scale, bias):
    """The formulas of the operator, forwards: x [T, N, I], gates in its order (input, output, forget, cell)."""
    scale, codes = dynamic(x)
    projected = (codes @ w.astype(np.int64)).astype(np.float32) * (scale * w_scale)
    outputs = []
    for current in projected:
        scale, codes = dynamic(h)
        gates = current + (codes @ r.astype(np.int64)).astype(np.float32) * (scale * r_scale) + bias
        i, o, f, g = np.split(gates.astype(np.float64), 4, -1)
        c = (c * sigmoid(f) + sigmoid(i) * np.tanh(g)).astype(np.float32)
        h = (sigmoid(o) * np.tanh(c.astype(np.float64))).astype(np.float32)
        outputs.append(h)
    return np.stack(outputs), h, c


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


@pytest.mark.medium
def test_the_kernel_computes_these_formulas(started):
    _, file = started
    graph = onnx.load(file).graph
    stored = {each.name: numpy_helper.to_array(each) for each in graph.initializer}
    node = next(each for each in graph.node if each.op_type == "DynamicQuantizeLSTM")
    w, r = stored[node.input[1]][0], stored[node.input[2]][0]
    scales = [stored[node.input[place]][0] for place in (8, 10)]
    order = np.concatenate([np.arange(4 * H).reshape(4, H)[gate] for gate in GATES])
    bias = stored["lstm.bias_ih_l0"][order] + stored["lstm.bias_hh_l0"][order]
    x, h, c = (each.numpy() for each in inputs())
    expected, *_ = kernel(x.transpose(1, 0, 2), h[0], c[0], w, r, *scales, bias)
    graph.output.extend([onnx.helper.make_empty_tensor_value_info(node.output[0])])
    model = onnx.helper.make_model(graph, opset_imports=onnx.load(file).opset_import, ir_version=9)
    session, _ = session_with(model.SerializeToString(), Optimizations.ON, threads=1)
    found = session.run([node.output[0]], dict(zip(("x", "h", "c"), (x, h, c), strict=True)))[0][:, 0]
    assert sqnr_db(found, expected) > 120


@pytest.mark.medium
@pytest.mark.parametrize("optimizations", [Optimizations.OFF, Optimizations.ON])
def test_the_file_computes_the_simulation_at_any_length_and_batch(started, optimizations):
    sim, file = started
    for given in (inputs(), inputs(1, 30)):
        with torch.no_grad():
            expected = sim.model(*given)
        for found, ours in zip(run(file, given, optimizations=optimizations), expected, strict=True):
            assert sqnr_db(found, ours.numpy()) > 110  # but for float rounding


@pytest.mark.medium
def test_a_batch_of_one_does_not_depend_on_threads(started):
    _, file = started
    given = inputs(1)
    assert all(np.array_equal(*each) for each in zip(
        run(file, given, threads=1), run(file, given, threads=2), strict=True))


@pytest.mark.medium
def test_each_direction_of_each_layer_is_one_operator_on_int8_codes(started):
    _, file = started
    graph = onnx.load(file).graph
    kinds = [node.op_type for node in graph.node]
    assert kinds.count("DynamicQuantizeLSTM") == 4
    assert not {"LSTM", "Scan", "DynamicQuantizeLinear", "DequantizeLinear"} & set(kinds)
    codes = [each for each in graph.initializer if len(each.dims) == 3]
    assert {each.data_type for each in codes} == {onnx.TensorProto.INT8}


@pytest.mark.medium
def test_its_sites_are_read_back(started):
    sim, file = started
    stored = {site.name: site for site in stored_sites(file)}
    assert set(stored) == set(sim.quantizers)
    parameters = dict(sim.model.named_parameters())
    for name in ("lstm.weight_ih_l0", "lstm.weight_hh_l1_reverse"):
        assert stored[name].encoding.equals(sim.encodings()[name])
        assert torch.equal(stored[name].constant(), sim.quantizers[name](parameters[name]).detach())
    read = {site.site for site in site_outputs(file, codes=False)}
    assert {"lstm.l1.projection:in[0]", "lstm.l0_reverse.cell.hidden_projection:in[0]"} <= read


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"weight": {"granularity": "per_tensor"}}, {}])
def test_one_scale_and_no_biases(options, tmp_path):
    config = {"version": 1, "extends": "onnxruntime", "rules": [{"match": {"op": "lstm"}, **options}]} if options else (
        "dynamic")
    given = inputs()
    sim = exported(Started(bias=False), given, tmp_path / "out", config)
    with torch.no_grad():
        expected = sim.model(*given)
    for found, ours in zip(run(tmp_path / "out" / "model.onnx", given), expected, strict=True):
        assert sqnr_db(found, ours.numpy()) > 110


@pytest.mark.slow
@pytest.mark.parametrize(("config", "weights"), [("onnxruntime", 0), ("onnxruntime_vnni", 2)])
def test_weights_whose_sums_can_saturate_are_named(config, weights, tmp_path):
    exported(nn.LSTM(I, H), (torch.randn(T, N, I),), tmp_path / "out", config)
    assert len(saturating_weights(tmp_path / "out" / "model.onnx")) == weights


def test_the_orders_of_the_gates_are_inverse():
    torch_gates, operator_gates = "ifgo", "iofg"
    assert "".join(torch_gates[each] for each in GATES) == operator_gates
    assert "".join(operator_gates[each] for each in TORCH_GATES) == torch_gates


@pytest.mark.slow
def test_without_the_rewrite_the_file_is_no_onnx(tmp_path, monkeypatch):
    leave_out(monkeypatch, "write_dynamic_lstms")
    with pytest.raises(qtk.errors.ExportError, match="DynamicLSTM"):
        exported(nn.LSTM(I, H, batch_first=True), inputs(length=3)[:1], tmp_path / "out")
