"""Products with stacks of matrices: integers at the scales of the simulation, and every site still in the file."""

import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import nn

import qtk
from qtk.export.onnx.qdq import read
from qtk.runtimes.site_outputs import site_outputs, write_with_outputs
from tests.export.onnx.optimized import float_weighted, kinds
from tests.export.onnx.simulated import run_onnx


class Product(nn.Module):
    """x @ W, a stack of 3 matrices with columns of very different size, held as the axes say."""

    def __init__(self, axes=None):
        super().__init__()
        stack = torch.randn(3, 64, 8) * torch.logspace(-2, 2, 8)
        back = None if axes is None else [axes.index(axis) for axis in range(3)]
        self.weight, self.axes = nn.Parameter(stack if back is None else stack.permute(back).contiguous()), axes

    def forward(self, x):
        return x @ (self.weight if self.axes is None else self.weight.permute(self.axes))


class ReadTwice(nn.Module):
    """A stack that two products read, and an input that a sum reads too."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 16, 16) * torch.logspace(-1, 1, 16))

    def forward(self, x):
        return (torch.relu(x @ self.weight) @ self.weight) + x


def exported(tmp_path, model, x, **options):
    sim = qtk.QuantSim(model.eval(), x, **options)
    sim.compute_encodings([x], progress=False)
    sim.export(tmp_path / "out", formats=("onnx",))
    return sim, tmp_path / "out" / "model.onnx"


def of_weights(**setting):
    return {"version": 1, "defaults": {"weight": {"granularity": "per_channel", **setting}}}


CONFIGS = {
    "default": "default",
    "onnxruntime": "onnxruntime",
    "zero points": of_weights(symmetric=False, dtype="uint8"),
    "uint8 around 128": of_weights(dtype="uint8", symmetric=True),
    "int8 inputs": "openvino",
}


def assert_as_simulated(sim, path, x, *, products):
    nodes = onnx.load(path).graph.node
    assert [node.op_type for node in nodes].count("QLinearMatMul") == products
    assert kinds(path)["QLinearMatMul"] == products
    assert float_weighted(path) == []
    read_by = {name for node in nodes for name in node.input} | {"output"}
    assert not [node.name for node in nodes if not read_by & set(node.output)]  # a runtime would run them
    step = float(list(sim.encodings().values())[-1].scale.max())
    with torch.no_grad():
        expected = sim.model(x)
    for optimized in (False, True):
        (got,) = run_onnx(path, x, optimized=optimized)
        assert float((torch.from_numpy(got) - expected).abs().max()) <= step * 1.001
        assert float((torch.from_numpy(got) != expected).float().mean()) < 0.01
    stored = read(path)
    assert stored.keys() == sim.encodings().keys()
    assert all(stored[name].equals(encoding) for name, encoding in sim.encodings().items())


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_scale_for_each_matrix_and_column(config, tmp_path):
    torch.manual_seed(0)
    x = torch.randn(3, 5, 64)
    sim, path = exported(tmp_path, Product(), x, config=config)
    assert sim.encodings()["weight"].scale.numel() == 3 * 8
    assert_as_simulated(sim, path, x, products=1)


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("axes", [(0, 2, 1), (2, 0, 1)], ids=["out in", "experts last"])
def test_weights_with_their_axes_in_another_order(axes, tmp_path):
    torch.manual_seed(0)
    x = torch.randn(3, 5, 64)
    assert_as_simulated(*exported(tmp_path, Product(axes), x), x, products=1)


@pytest.mark.medium
def test_what_is_read_twice(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(3, 5, 16)
    assert_as_simulated(*exported(tmp_path, ReadTwice(), x), x, products=2)


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("codes", [True, False], ids=["codes", "dequantized"])
def test_their_inputs_can_be_returned(codes, tmp_path):
    torch.manual_seed(0)
    x = torch.randn(3, 5, 64)
    sim, path = exported(tmp_path, Product(), x)
    outputs = site_outputs(path, codes=codes)
    assert [output.site for output in outputs] == ["x:input", "matmul:out"]
    got = run_onnx(write_with_outputs(path, outputs, tmp_path), x, optimized=False)
    with torch.no_grad():
        expected = sim.quantizers["x:input"](x)
    value = next(each for each in got if each.shape == (3, 5, 64))
    assert torch.equal(outputs[0].reals(torch.from_numpy(value)), expected)


@pytest.mark.medium
def test_the_reference_evaluator_agrees(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(3, 5, 64)
    sim, path = exported(tmp_path, Product(), x)
    (got,) = ReferenceEvaluator(str(path)).run(None, {"x": x.numpy()})
    step = float(sim.encodings()["matmul:out"].scale)
    with torch.no_grad():
        assert float((torch.from_numpy(got) - sim.model(x)).abs().max()) <= step * 1.001


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("options", [
    {"activation_bits": None},
    {"config": {"version": 1, "defaults": {"weight": {"granularity": "per_block", "block_size": 16}}}},
], ids=["float result", "blocks within a matrix"])
def test_products_of_other_values_stay(options, tmp_path):
    torch.manual_seed(0)
    x = torch.randn(3, 5, 64)
    sim, path = exported(tmp_path, Product(), x, **options)
    assert "QLinearMatMul" not in {node.op_type for node in onnx.load(path).graph.node}
    (got,) = run_onnx(path, x, optimized=False)
    torch.testing.assert_close(torch.from_numpy(got), sim.model(x).detach(), rtol=1e-3, atol=1e-3)


@pytest.mark.medium
def test_a_relu_stays_whose_zeros_are_not_the_lowest_code(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(3, 5, 64)
    sim = qtk.QuantSim(nn.Sequential(Product(), nn.ReLU()).eval(), x)
    sim.compute_encodings([x], progress=False)
    sim.set_range(list(sim.encodings())[-1], -3000.0, 3000.0)
    sim.export(tmp_path / "out", formats=("onnx",))
    (got,) = run_onnx(tmp_path / "out" / "model.onnx", x, optimized=False)
    assert got.min() == 0
    with torch.no_grad():
        assert float((torch.from_numpy(got) - sim.model(x)).abs().max()) <= 6000 / 255 * 1.001
