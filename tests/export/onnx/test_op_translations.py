"""Translations to ONNX against torch, at zeros, far from them and at borders; with integer kernels and without."""

import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

import qtk
from qtk.errors import ExportError
from qtk.export.onnx.op_translations import widen_indices
from tests.export.onnx.onnxruntime.test_flat_linears import exported, optimized_kinds, steps
from tests.export.onnx.simulated import run_onnx


class Float(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *tensors):
        return self.function(*tensors)


SIGNED = torch.tensor([-2.0, -1.0, -0.0, 0.0, 1.0, 3.0])
PAIRS = tuple(each.flatten() for each in torch.meshgrid(SIGNED, SIGNED, indexing="ij"))


@pytest.mark.medium
def test_angles_and_logarithms_far_from_zero(tmp_path):
    def function(y, x):
        return torch.atan2(y, x), nn.functional.logsigmoid(60 * x)

    sim = qtk.QuantSim(Float(function).eval(), PAIRS, weight_bits=None, activation_bits=None)
    sim.export(tmp_path / "out", formats=("onnx",))
    for found, expected in zip(run_onnx(tmp_path / "out" / "model.onnx", *PAIRS), function(*PAIRS), strict=True):
        torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-6, atol=1e-6)


class Convolved(nn.Module):
    """A convolution with settings as they are written: one number for all axes, or one for each."""

    def __init__(self, *shape, **settings):
        super().__init__()
        self.weight, self.settings = nn.Parameter(torch.randn(shape)), settings

    def forward(self, x):
        return getattr(nn.functional, f"conv{self.weight.ndim - 2}d")(x, self.weight, **self.settings)


CONVOLUTIONS = {f"{rank}d, {name}": (rank, settings) for rank in (1, 2, 3) for name, settings in {
    "plain": {}, "groups": {"groups": 2, "padding": rank * [1]}, "one number": {"stride": [2], "padding": [1]},
    "same": {"padding": "same", "dilation": 2},
}.items()}


@pytest.mark.sample(2)
@pytest.mark.medium
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_without_bias_are_integer(name, tmp_path):
    (rank, settings), sizes = CONVOLUTIONS[name], (7, 6, 5)
    model, x = Convolved(8, 4 // settings.get("groups", 1), *rank * [3], **settings), torch.randn(2, 4, *sizes[:rank])
    for bits in (8, 4):
        folder = tmp_path / str(bits)
        sim = exported(model, x, folder, weight_bits=bits)
        assert optimized_kinds(folder)["QLinearConv"] == 1
        for optimized, given in ((False, torch.randn(3, 4, *sizes[:rank])), (True, x)):
            assert steps(sim, given, folder, optimized=optimized).max() < 1.01
    (conv,) = [node for node in onnx.load(folder / "model.onnx").graph.node if node.op_type == "Conv"]
    assert len(conv.input) == 2


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_convolution_without_batch_and_without_bias(rank, tmp_path):
    x = torch.randn(4, *rank * [5])
    sim = exported(Convolved(8, 4, *rank * [3]), x, tmp_path / "out", dynamic_shapes=None)
    assert steps(sim, x, tmp_path / "out", optimized=True).max() < 1.01


class Pooled(nn.Module):
    def __init__(self, pool, *, dimensions=2):
        super().__init__()
        self.conv, self.pool = getattr(nn, f"Conv{dimensions}d")(3, 4, 1), pool

    def forward(self, x):
        return self.pool(self.conv(x))


POOLS = {
    "divisor": nn.AvgPool2d(2, divisor_override=3), "last window cut": nn.AvgPool2d(2, ceil_mode=True),
    "cut, padded": nn.AvgPool2d(3, 2, padding=1, ceil_mode=True),
    "cut, padding left out": nn.AvgPool2d(3, 2, padding=1, ceil_mode=True, count_include_pad=False),
    "begins in padding": nn.AvgPool2d(2, 3, padding=1, ceil_mode=True),
}


@pytest.mark.sample(3)
@pytest.mark.medium
@pytest.mark.parametrize("length", [12, 13])
@pytest.mark.parametrize("name", POOLS)
def test_average_pools_are_those_of_torch_in_integers_too(name, length, tmp_path):
    x = torch.randn(2, 3, length, length)
    sim = exported(Pooled(POOLS[name]), x, tmp_path / "out")
    for optimized in (False, True):
        assert steps(sim, x, tmp_path / "out", optimized=optimized).max() < 1.01


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize(("pool", "shape"), [
    (nn.AvgPool1d(3, 2, 1, ceil_mode=True), (2, 3, 12)), (nn.AvgPool3d(2, divisor_override=5), (1, 3, 6, 6, 6)),
    (nn.AvgPool2d(3, 2, 1, ceil_mode=True), (3, 12, 12)),
], ids=["1d", "3d", "no batch"])
def test_pools_over_other_axes(pool, shape, tmp_path):
    x, dimensions = torch.randn(shape), 1 if isinstance(pool, nn.AvgPool1d) else 3 if len(shape) == 5 else 2
    sim = exported(Pooled(pool, dimensions=dimensions), x, tmp_path / "out")
    assert steps(sim, x, tmp_path / "out", optimized=True).max() < 1.01


@pytest.mark.medium
def test_a_divisor_with_windows_behind_the_input_is_refused(tmp_path):
    sim = qtk.QuantSim(Pooled(nn.AvgPool2d(2, ceil_mode=True, divisor_override=3)).eval(), torch.randn(2, 3, 13, 13))
    sim.compute_encodings([torch.randn(2, 3, 13, 13)], progress=False)
    with pytest.raises(ExportError, match=r"over \(2, 2\) with divisor_override=3 .* leave ceil_mode out"):
        sim.export(tmp_path / "out", formats=("onnx",))


def test_indices_are_widened():
    text = """<ir_version: 10, opset_import: ["" : 20]>
    g (float[4] x, int32[2,1] at, float[2] values) => (float[4] y) { y = ScatterND (x, at, values) }"""
    model = ir.from_onnx_text(text)
    widen_indices(model.graph)
    cast, scatter = model.graph
    assert (cast.op_type, cast.outputs[0].dtype) == ("Cast", ir.DataType.INT64)
    assert scatter.inputs[1] is cast.outputs[0]
    widen_indices(model.graph)
    assert len(model.graph) == 2
