"""``torch.onnx.export(sim.model, dynamo=True)`` without a translation table: the numbers of the simulation."""

from collections import Counter

import numpy as np
import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import nn
from torch.export import Dim

import qtk
from qtk.ops.fake_quantize import fake_quantize
from tests.export.onnx.simulated import run_onnx
from tests.zoo.prepared import slow_but

PER_BLOCK = {"bits": 4, "symmetric": True, "granularity": "per_block", "block_size": 12}


def of(weight, activation):
    return {"version": 1, "defaults": {"weight": weight, "activation": activation}}


CONFIGS = {
    "default": "default", "onnxruntime": "onnxruntime", "dynamic": "dynamic", "dynamic_per_token": "dynamic_per_token",
    "int8": of({"symmetric": True, "granularity": "per_channel"}, {"symmetric": True}),
    "blocks and 16 bits": of(PER_BLOCK, {"bits": 16})
    | {"rules": [{"match": {"op": "conv"}, "weight": {"bits": 5, "granularity": "per_channel"}}]},
    "5 bits": of({"bits": 5, "symmetric": True, "granularity": "per_channel", "narrow_range": True}, {"bits": 6}),
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.linear = nn.Conv2d(3, 4, 3), nn.LayerNorm(36), nn.Linear(36, 5)

    def forward(self, x):
        return self.linear(nn.functional.gelu(self.norm(self.conv(x).relu().flatten(2))))


def simulated(config, x):
    torch.manual_seed(0)
    sim = qtk.QuantSim(Net().eval(), x, config=config)
    sim.compute_encodings([x], progress=False)
    return sim


def difference(sim, path, x):
    with torch.no_grad():
        expected = sim.model(x).numpy()
    pairs = [*run_onnx(path, x, optimized=False), *run_onnx(path, x, optimized=True)]
    return max(float(abs(got - expected).max() / abs(expected).max()) for got in pairs)


@pytest.mark.sample(2)
@pytest.mark.medium
@pytest.mark.parametrize("name", slow_but(CONFIGS, "onnxruntime", "dynamic_per_token", "blocks and 16 bits"))
def test_the_file_computes_the_numbers_of_the_simulation(name, tmp_path):
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    sim = simulated(CONFIGS[name], x)
    torch.onnx.export(sim.model, (x,), tmp_path / "model.onnx", dynamo=True, verbose=False)
    assert difference(sim, tmp_path / "model.onnx", x) < 1e-6


@pytest.mark.medium
def test_a_captured_program_and_a_dynamic_batch(tmp_path):
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    sim = simulated("default", x)
    program = torch.export.export(sim.model, (x,), dynamic_shapes=({0: Dim.AUTO},))
    assert any("fake_quantize" in str(node.target) for node in program.graph.nodes)
    torch.onnx.export(program, (), tmp_path / "model.onnx", dynamo=True, verbose=False)
    kinds = Counter(node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node)
    assert kinds["QuantizeLinear"] >= sum(not site.name.endswith("weight") for site in sim.plan)
    more = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = sim.model(more).numpy()
    for optimized in (False, True):  # a value on a rounding edge behind norm and GELU may get the next code
        (got,) = run_onnx(tmp_path / "model.onnx", more, optimized=optimized)
        assert abs(got - expected).max() <= float(sim.encodings()["linear:out"].scale) * 1.001


@pytest.mark.medium
def test_dynamic_quantization_is_the_operator_that_runtimes_know(tmp_path):
    x = torch.randn(2, 3, 8, 8)
    torch.onnx.export(simulated("dynamic", x).model, (x,), tmp_path / "model.onnx", dynamo=True, verbose=False)
    kinds = Counter(node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node)
    assert kinds["DynamicQuantizeLinear"] == 1


@pytest.mark.sample(2)
@pytest.mark.medium
@pytest.mark.pairwise(dtype=(torch.float32, torch.float16), limits=((-128, 127), (-7, 7), (-64, 64)), axis=(None, 0, 1))
def test_every_element_in_onnx_itself(dtype, limits, axis, tmp_path):
    qmin, qmax = limits

    class Quantized(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.rand(1 if axis is None else (6, 7)[axis]) + 0.1)
            self.register_buffer("zero_point", torch.randint(qmin, qmax, self.scale.shape, dtype=torch.int32))

        def forward(self, x):
            sizes = () if axis is None else tuple(1 if other == axis else -1 for other in range(2))
            return fake_quantize(x, self.scale, self.zero_point, sizes, qmin, qmax)

    torch.manual_seed(0)
    model, x = Quantized().eval(), (torch.randn(6, 7) * 40).to(dtype)
    torch.onnx.export(model, (x,), tmp_path / "model.onnx", dynamo=True, verbose=False)
    (got,) = ReferenceEvaluator(str(tmp_path / "model.onnx")).run(None, {"x": x.numpy()})
    assert np.array_equal(got, model(x).numpy())


@pytest.mark.medium
def test_a_program_for_torch_keeps_the_op():
    x = torch.randn(2, 3, 8, 8)
    program = torch.export.export(simulated("default", x).model, (x,)).run_decompositions({})
    assert any(node.target is torch.ops.qtk.fake_quantize.default for node in program.graph.nodes)
