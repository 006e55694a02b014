"""Products with stored weights: which kernels ONNX Runtime runs them on, and that the numbers are the simulation's."""

import numpy as np
import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import nn

import qtk
from qtk.export.onnx.stored_sites import stored_sites
from qtk.runtimes.session import FLOAT_PRODUCTS, create_session
from tests.export.onnx.optimized import float_weighted, kinds, optimized
from tests.export.onnx.simulated import run_onnx
from tests.export.onnx.without_vnni import QEMU, run_without_vnni


class Product(nn.Module):
    """x @ W, W held as the axes say."""

    def __init__(self, *shape, axes=None):
        super().__init__()
        self.weight, self.axes = nn.Parameter(torch.randn(*shape)), axes

    def forward(self, x):
        return x @ (self.weight if self.axes is None else self.weight.permute(self.axes))


def mlp(width=64):
    return nn.Sequential(nn.Linear(width, 48), nn.GELU(), nn.Linear(48, 8))


def exported(tmp_path, model, *inputs, config="dynamic", fixed=False, **options):
    inputs_given = inputs if len(inputs) > 1 else inputs[0]
    prepared = qtk.prepare_model(model.eval(), inputs_given, dynamic_shapes=None) if fixed else model.eval()
    sim = qtk.QuantSim(prepared, inputs_given, config=config, **options)
    sim.compute_encodings([inputs_given], progress=False)
    sim.export(tmp_path / "out", formats=("onnx",))
    return sim, tmp_path / "out" / "model.onnx"


def error(sim, path, *inputs, optimized=True):
    """The largest difference to the simulation, relative to its largest value."""
    with torch.no_grad():
        made = sim.model(*inputs)
    expected = (made[0] if isinstance(made, tuple) else made).numpy()
    got, *_ = run_onnx(path, *inputs, optimized=optimized)
    return float(abs(got - expected).max() / abs(expected).max())


DYNAMIC = {
    "rows": (mlp, (4, 64), False, 2),
    "tokens": (mlp, (2, 5, 64), False, 2),
    "tokens of fixed number": (mlp, (1, 5, 64), True, 2),
    "no bias": (lambda: nn.Linear(64, 8, bias=False), (4, 64), False, 1),
    "constant factor": (lambda: Product(64, 8), (4, 64), False, 1),
    "experts": (lambda: Product(3, 64, 8), (3, 5, 64), False, 1),
    "experts of outputs": (lambda: Product(3, 8, 64, axes=(0, 2, 1)), (3, 5, 64), False, 1),
    "experts behind": (lambda: Product(64, 8, 3, axes=(2, 0, 1)), (3, 5, 64), False, 1),
    "lstm": (lambda: nn.LSTM(24, 16, batch_first=True), (2, 7, 24), False, 1),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(32, 2, 48, batch_first=True), (2, 7, 32), False, 4),
}


INTEGER = ("DynamicQuantizeMatMul", "MatMulIntegerToFloat", "DynamicQuantizeLSTM")


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("name", DYNAMIC)
def test_the_target_dynamic_runs_in_integers(name, tmp_path):
    make, shape, fixed, products = DYNAMIC[name]
    torch.manual_seed(0)
    x = torch.randn(shape)
    sim, path = exported(tmp_path, make(), x, fixed=fixed)
    assert sum(kinds(path)[kind] for kind in INTEGER) == products
    assert float_weighted(path) == []
    assert not {"MatMulNBits", "DequantizeLinear"} & kinds(path).keys()
    for optimize in (False, True):
        assert error(sim, path, x, optimized=optimize) < 2e-6


@pytest.mark.medium
def test_onnx_itself_computes_the_same(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(4, 64)
    sim, path = exported(tmp_path, mlp(), x)
    (got,) = ReferenceEvaluator(str(path)).run(None, {"input": x.numpy()})
    with torch.no_grad():
        expected = sim.model(x).numpy()
    assert abs(got - expected).max() / abs(expected).max() < 2e-6


@pytest.mark.skipif(QEMU is None, reason="needs qemu-user to emulate a CPU without VNNI")
def test_the_same_numbers_without_vnni(tmp_path):
    torch.manual_seed(0)
    x = torch.rand(4, 64) + 1  # high codes, which saturate beside high weights
    model = nn.Linear(64, 8)
    with torch.no_grad():
        model.weight.abs_().add_(0.2)
    sim, path = exported(tmp_path, model, x)
    (got,) = run_without_vnni(path, input=x.numpy())
    with torch.no_grad():
        assert np.allclose(got, sim.model(x).numpy(), rtol=2e-6, atol=0)


def in_blocks(block, **weight):
    given = {"bits": 4, "symmetric": True, "granularity": "per_block", "block_size": block, **weight}
    return {"version": 1, "defaults": {"weight": given}}


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "zero points"])
@pytest.mark.parametrize("shape", [(4, 256), (2, 5, 256)], ids=["rows", "tokens"])
def test_weights_in_blocks_become_matmulnbits(shape, symmetric, tmp_path):
    torch.manual_seed(0)
    x, model = torch.randn(shape), nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 64))
    sim, path = exported(tmp_path, model, x, config=in_blocks(32, symmetric=symmetric), activation_bits=None)
    nodes = [node for node in optimized(path).graph.node if node.op_type == "MatMulNBits"]
    assert len(nodes) == 2
    assert not {"DequantizeLinear", "MatMul", "Gemm"} & kinds(path).keys()
    assert all(bool(node.input[3:4] and node.input[3]) is not symmetric for node in nodes)
    assert error(sim, path, x) < 2e-6
    weights = 256 * 512 + 512 * 64
    per_weight = (path.stat().st_size - 4 * (512 + 64) - 5000) / weights  # 5,000: what a graph of this size takes
    assert per_weight < 0.5 + 4 / 32 + (0 if symmetric else 0.5 / 32)  # codes, scales, zero points


@pytest.mark.skipif(QEMU is None, reason="needs qemu-user to emulate a CPU without VNNI")
def test_blocks_without_vnni(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(4, 64)
    sim, path = exported(tmp_path, nn.Linear(64, 8), x, config=in_blocks(32), activation_bits=None)
    (got,) = run_without_vnni(path, input=x.numpy())  # with ONNX Runtime's default: inputs rounded to 8 bits too
    with torch.no_grad():
        expected = sim.model(x).numpy()
    assert 1e-5 < abs(got - expected).max() / abs(expected).max() < 0.02


@pytest.mark.medium
def test_sessions_compute_products_with_weights_alone_in_float(tmp_path):
    _, path = exported(tmp_path, nn.Linear(64, 8), torch.randn(4, 64), activation_bits=None, config="default")
    session, _ = create_session(path)
    assert session.get_session_options().get_session_config_entry(FLOAT_PRODUCTS) == "1"
    (node,) = (node for node in optimized(path).graph.node if node.op_type == "MatMulNBits")
    assert {attribute.name: attribute.i for attribute in node.attribute}["accuracy_level"] == 1


@pytest.mark.medium
def test_what_is_stored_transposed_is_read_as_it_was(tmp_path):
    torch.manual_seed(0)
    sim, path = exported(
        tmp_path, nn.Linear(64, 8), torch.randn(4, 64), config=in_blocks(32, symmetric=False), activation_bits=None
    )
    codes = next(each for each in onnx.load(path).graph.initializer if each.name.startswith("weight"))
    assert list(codes.dims) == [64, 8]
    (stored,) = stored_sites(path)
    assert stored.axes == (1, 0)
    with torch.no_grad():
        assert torch.equal(stored.constant(), sim.quantizers["weight"](sim.model.weight))


@pytest.mark.medium
def test_a_gemm_of_calibrated_values_stays(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(4, 64)
    _, path = exported(tmp_path, nn.Linear(64, 8), x, config="onnxruntime")
    assert "Gemm" in {node.op_type for node in onnx.load(path).graph.node}
