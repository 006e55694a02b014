import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

import qtk
from qtk.export.onnx.names import ValueNames
from qtk.export.onnx.onnxruntime.qdq_barrier import insert_barrier
from qtk.runtimes.executed_nodes import executed_nodes
from qtk.runtimes.session import create_session
from tests.export.onnx.onnxruntime.test_flat_linears import exported, optimized_kinds, steps
from tests.exported_files import leave_out


def chain(first, second):
    """A graph of two operators of one input each behind codes; what they make, and a reader of it."""
    codes = ir.Value(name="codes", type=ir.TensorType(ir.DataType.UINT8), shape=ir.Shape([4]))
    scale = ir.Value(name="scale", shape=ir.Shape([]), const_value=ir.tensor(np.float32(1)))
    made = ir.node(first, [codes, scale] if first == "DequantizeLinear" else [codes])
    moved = ir.node(second, [made.outputs[0]])
    reader = ir.node("Softmax", [moved.outputs[0]])
    graph = ir.Graph([codes], reader.outputs, nodes=[made, moved, reader], opset_imports={"": 19})
    return ValueNames(graph), moved.outputs[0], reader


@pytest.mark.parametrize(("first", "second", "through"), [
    ("DequantizeLinear", "Transpose", True), ("DequantizeLinear", "Erf", False), ("Cast", "Transpose", False),
])
def test_only_dequantized_values_are_read_through_max(first, second, through):
    names, value, reader = chain(first, second)
    insert_barrier(value, [(reader, 0)], names)
    (source,) = reader.inputs
    assert (source is value) is not through
    if through:
        assert (source.producer().op_type, list(source.producer().inputs)) == ("Max", [value])
        assert source.name == f"{value.name}/Max"


class Moved(nn.Module):
    def forward(self, x):
        return x.unflatten(0, (-1, 4)).transpose(1, 2).softmax(1)


class Pooled(nn.Module):
    def forward(self, x):
        return nn.functional.max_pool2d(x[None, None], (2, 1)).flatten(0, 2).softmax(-1)


def scores(experts, spread):
    """Near to one another where ``spread`` is small: the scale of their softmax is then far below 1/255."""
    return spread * torch.randn(256, experts, generator=torch.Generator().manual_seed(0))


def differing_codes(sim, x, folder, *, optimized):
    session, _ = create_session(folder / "model.onnx", optimized=optimized)
    (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    scale = float(list(sim.encodings().values())[-1].scale)
    return np.abs(np.round((got - sim.model(x).detach().numpy()) / scale))


MODELS = {"last axis": lambda: nn.Softmax(-1), "first axis": lambda: nn.Softmax(0), "moved": Moved, "pooled": Pooled}


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.pairwise(experts=(2, 4, 8), spread=(0.01, 0.1, 1.0), name=MODELS)
def test_codes_are_those_of_the_simulation(experts, spread, name, tmp_path):
    make = MODELS[name]
    x = scores(experts, spread)
    sim = exported(make(), x, tmp_path / "out", config="default")
    kinds = optimized_kinds(tmp_path / "out")
    assert (kinds["Softmax"], kinds["QLinearSoftmax"]) == (1, 0)
    for optimized in (False, True):
        difference = differing_codes(sim, x, tmp_path / "out", optimized=optimized)
        assert difference.max() <= 1
        assert (difference > 0).mean() < 0.002


@pytest.mark.medium
def test_scores_in_float_are_read_as_they_are(tmp_path):
    exported(nn.Sequential(nn.Linear(16, 4), nn.Softmax(-1)), torch.randn(64, 16), tmp_path / "out")
    assert optimized_kinds(tmp_path / "out")["Max"] == 0


@pytest.mark.slow
def test_without_it_the_integer_operator_computes_other_codes(tmp_path, monkeypatch):
    leave_out(monkeypatch, "keep_softmax_float")
    x = scores(4, 1.0)
    sim = exported(nn.Softmax(-1), x, tmp_path / "out", config="default")
    assert optimized_kinds(tmp_path / "out")["QLinearSoftmax"] == 1
    assert (differing_codes(sim, x, tmp_path / "out", optimized=True) > 0).mean() > 0.01


@pytest.mark.medium
def test_its_reason_is_named(tmp_path):
    exported(Moved(), scores(4, 1.0), tmp_path / "out", config="default")
    optimized_kinds(tmp_path / "out")
    found = executed_nodes(tmp_path / "out" / "optimized.onnx", tmp_path / "out" / "model.onnx", {})
    reasons = {node.kind: node.reason for node in found.floats}
    assert reasons["Softmax"] == "ONNX Runtime's integer Softmax computes other codes than the simulation"


INTEGER = ("QGemm", "QLinearConv", "QLinearMatMul", "MatMulInteger", "MatMulIntegerToFloat", "ConvInteger")


class Matrix(nn.Module):
    """A parameter on either side of a product."""

    def __init__(self, *, left):
        super().__init__()
        self.left, self.weight = left, nn.Parameter(torch.randn(16, 16))

    def forward(self, x):
        return self.weight @ x if self.left else x @ self.weight


PRODUCTS = {
    "linear": (lambda: nn.Linear(16, 8), (4, 16)),
    "linear_relu": (lambda: nn.Sequential(nn.Linear(16, 8), nn.ReLU()), (4, 3, 16)),
    "conv": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), (2, 3, 9, 9)),
    "conv_transpose": (lambda: nn.ConvTranspose2d(3, 8, 3), (2, 3, 9, 9)),
    "matmul": (lambda: Matrix(left=False), (4, 16)),
    "matmul_left": (lambda: Matrix(left=True), (2, 16, 8)),
}
FLOAT_WEIGHTS = {"version": 1, "extends": "onnxruntime", "defaults": {"weight": "float"}}


@pytest.mark.medium
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", PRODUCTS)
def test_float_weights_are_multiplied_as_they_are(name, tmp_path):
    make, shape = PRODUCTS[name]
    torch.manual_seed(0)
    x, folder = torch.randn(*shape), tmp_path / "out"
    sim = exported(make(), x, folder, config=FLOAT_WEIGHTS)
    assert not any(quantizer.static for quantizer in sim.quantizers.values())
    kinds = optimized_kinds(folder)
    assert not any(kinds[kind] for kind in INTEGER)
    difference = steps(sim, x, folder, optimized=True)
    assert difference.max() < 1.01
    assert (difference > 0.01).mean() < 0.005


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linear", "conv"])
def test_without_it_onnx_runtime_rounds_weights(name, tmp_path, monkeypatch):
    leave_out(monkeypatch, "keep_float_weights")
    make, shape = PRODUCTS[name]
    torch.manual_seed(0)
    x, folder = torch.randn(*shape), tmp_path / "out"
    sim = exported(make(), x, folder, config=FLOAT_WEIGHTS)
    assert any(optimized_kinds(folder)[kind] for kind in INTEGER)
    assert (np.abs(steps(sim, x, folder, optimized=True)) > 0.01).mean() > 0.02


@pytest.mark.medium
def test_quantized_weights_are_read_as_before(tmp_path):
    x, folder = torch.randn(4, 16), tmp_path / "out"
    exported(nn.Linear(16, 8), x, folder)
    kinds = optimized_kinds(folder)
    assert (kinds["QGemm"], kinds["Max"]) == (1, 0)


class Rows(nn.Linear):
    """A layer on rows of two axes, which it reads and returns with three."""

    def forward(self, x):
        return super().forward(x.transpose(0, 1).reshape(-1, 16)).view(-1, 5, 8)


BIASED = {
    "rows": (lambda: Rows(16, 8), (64, 5, 16)),
    "linear": (lambda: nn.Linear(16, 8), (64, 16)),
    "conv": (lambda: nn.Conv2d(3, 8, 3), (4, 3, 9, 9)),
    "conv_relu": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), (4, 3, 9, 9)),
    "conv_transpose": (lambda: nn.ConvTranspose2d(3, 8, 3), (4, 3, 9, 9)),
}


def differing(name, folder, **widths):
    """The share of the outputs that are another code."""
    make, shape = BIASED[name]
    torch.manual_seed(0)
    x = torch.randn(*shape)
    sim = exported(make(), x, folder, config="default", **widths)
    return float((steps(sim, x, folder, optimized=True) > 0.5).mean())


@pytest.mark.sample(2)
@pytest.mark.medium
@pytest.mark.parametrize("name", BIASED)
def test_float_biases_are_added_as_they_are(name, tmp_path):
    assert differing(name, tmp_path / "out", weight_bits=4, activation_bits=4) < 0.001


@pytest.mark.slow
@pytest.mark.parametrize("name", ["conv", "linear", "rows"])
def test_without_it_onnx_runtime_rounds_biases(name, tmp_path, monkeypatch):
    leave_out(monkeypatch, "keep_float_biases")
    assert differing(name, tmp_path / "out", weight_bits=4, activation_bits=4) > 0.005


@pytest.mark.medium
def test_biases_of_integer_products_are_read_as_before(tmp_path):
    x, folder = torch.randn(4, 16), tmp_path / "out"
    exported(nn.Linear(16, 8), x, folder, config="default")
    kinds = optimized_kinds(folder)
    assert (kinds["QGemm"], kinds["Max"]) == (1, 0)


AXIS = {"bits": 8, "symmetric": True, "granularity": "per_channel", "axis": 1}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(6, 6)

    def forward(self, x, past):
        keys = torch.cat([past, self.project(x).view(2, 1, 2, 3).transpose(1, 2)], 2)
        return x.view(2, 1, 2, 3).transpose(1, 2) @ keys.transpose(2, 3)


def deployed(folder, *, symmetric=True):
    """The output of the simulation and of its file, and the operators of the optimized graph."""
    torch.manual_seed(0)
    inputs = torch.randn(2, 1, 6), torch.randn(2, 2, 1, 3) * torch.tensor([1.0, 30.0])[:, None, None]
    rules = [{"match": {"op": "concat"}, "output": {**AXIS, "symmetric": symmetric}},
             {"match": {"op": "matmul"}, "output": "float"}]
    sim = qtk.QuantSim(Attention().eval(), inputs, config={"version": 1, "rules": rules})
    sim.compute_encodings([inputs], progress=False)
    sim.export(folder / "out", formats="onnx", check=False)
    with torch.no_grad():
        expected = sim.model(*inputs)
    session, _ = create_session(folder / "out" / "model.onnx", optimized_file=folder / "optimized.onnx")
    kinds = {node.op_type for node in onnx.load(folder / "optimized.onnx").graph.node}
    (got,) = session.run(None, {"x": inputs[0].numpy(), "past": inputs[1].numpy()})
    return expected, torch.from_numpy(got), kinds


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("symmetric", [True, False])
def test_scales_of_heads_are_not_taken_for_scales_of_columns(symmetric, tmp_path):
    expected, got, kinds = deployed(tmp_path, symmetric=symmetric)
    assert torch.allclose(got, expected, atol=1e-5)
    assert "Max" in kinds
    assert not kinds & {"QLinearConcat", "QLinearMatMul"}


@pytest.mark.slow
def test_without_it_onnx_runtime_refuses_its_own_fusion(tmp_path, monkeypatch):
    leave_out(monkeypatch, "keep_axis_scales_float")
    with pytest.raises(Exception, match="MatMulIntegerToFloat"):
        deployed(tmp_path)
