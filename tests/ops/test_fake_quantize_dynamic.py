"""Fake-quantization with ranges taken at run time: against the formulas in numpy's float32, and ONNX Runtime."""

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper

from qtk.core.granularity import PerTensor, PerToken
from qtk.export.onnx.session import create_session
from qtk.kernels.backends import backends
from qtk.numerics import dynamic
from qtk.numerics.effective import SMALLEST_SCALE
from qtk.ops.fake_quantize_dynamic import fake_quantize_dynamic
from tests.kernels.conformance import KINDS, LAYOUTS, same_bits

CODES = {"int8": (-128, 127, True), "uint8": (0, 255, False), "int4": (-8, 7, True), "narrow": (-7, 7, True),
         "uint4": (0, 15, False), "int16": (-32768, 32767, False)}
SHAPES = [(1,), (37,), (3, 1), (5, 131), (2, 3, 7, 11), (4, 5, 1023), (9, 70000), (2, 0), (0, 4), (3, 197, 384)]
GRANULARITIES = {"per_tensor": PerTensor(), "per_token": PerToken()}
OP = torch.ops.qtk.fake_quantize_dynamic.default
kernels = pytest.importorskip("qtk.kernels.gpu.fake_quantize_dynamic")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # Triton's interpreter, at overflows and NaN
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def on_gpu(x, *spec):
    """The Triton kernels: compiled on a GPU, else in Triton's interpreter."""
    return tuple(part.cpu() for part in kernels.fake_quantize_dynamic(x.to(DEVICE), *spec))


WAYS = {"op": OP, "reference": dynamic.fake_quantize, "triton": on_gpu}


def by_hand(row: np.ndarray, qmin: int, qmax: int, symmetric: bool) -> tuple[np.ndarray, np.float32, int]:
    """One group of elements that share a scale, step by step in float32."""
    f = np.float32
    low, high = min(row.min(), f(0)), max(row.max(), f(0))
    scale = max(high / f(qmax), low / f(qmin)) if symmetric else (high - low) / f(qmax - qmin)
    scale = f(1) if scale == 0 else max(scale, f(SMALLEST_SCALE))
    zero = 0 if symmetric else int(np.clip(np.rint(f(qmin) - low / scale), qmin, qmax))
    codes = np.clip(np.rint(row / scale) + f(zero), qmin, qmax)
    return (codes - f(zero)) * scale, scale, zero


@pytest.mark.pairwise(shape=SHAPES, granularity=GRANULARITIES, codes=CODES, way=WAYS)
def test_is_the_formula(shape, granularity, codes, way):
    qmin, qmax, symmetric = CODES[codes]
    sizes = GRANULARITIES[granularity].block_size(len(shape))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 3 + 0.5
    result, scale, zero = WAYS[way](x, sizes, qmin, qmax, symmetric)
    assert scale.shape == GRANULARITIES[granularity].qparam_shape(shape)
    assert zero.shape == ((0,) if symmetric else scale.shape)
    assert zero.dtype == torch.int32
    if not x.numel():
        assert result.shape == shape
        assert bool((scale == 1).all())
        return
    rows = x.numpy().reshape(scale.numel(), -1)
    found = [by_hand(row, qmin, qmax, symmetric) for row in rows]
    assert torch.equal(result, torch.tensor(np.stack([row for row, _, _ in found])).reshape(shape))
    assert torch.equal(scale.reshape(-1), torch.tensor(np.array([step for _, step, _ in found])))
    if not symmetric:
        assert zero.reshape(-1).tolist() == [code for _, _, code in found]


@pytest.mark.pairwise(
    way=WAYS, codes=["int8", "uint8"], granularity=GRANULARITIES, layout=LAYOUTS, kind=KINDS
)
def test_every_layout_and_dtype_is_the_reference(way, codes, granularity, layout, kind):
    qmin, qmax, symmetric = CODES[codes]
    for shape in [(6,), (5, 131), (2, 3, 7, 11), (64, 1000)]:
        x = LAYOUTS[layout](torch.randn(shape, generator=torch.Generator().manual_seed(4)).to(kind))
        spec = GRANULARITIES[granularity].block_size(len(shape)), qmin, qmax, symmetric
        (own, own_scale, own_zero), (result, scale, zero) = WAYS[way](x, *spec), dynamic.fake_quantize(x, *spec)
        assert same_bits(own, result)
        assert own.stride() == torch.empty_like(x).stride()
        assert torch.equal(own_scale, scale)
        assert torch.equal(own_zero, zero)


@pytest.mark.parametrize("codes", ["int8", "uint8"])
@pytest.mark.parametrize("way", WAYS)
def test_special_numbers(way, codes):
    qmin, qmax, symmetric = CODES[codes]
    largest, tiny = torch.finfo(torch.float32).max, torch.finfo(torch.float32).smallest_normal
    x = torch.tensor([
        [torch.nan, 1.0, 2.0], [torch.inf, 1.0, -1.0], [-torch.inf, 1.0, torch.inf], [0.0, -0.0, 0.0],
        [largest, -largest, 1.0], [tiny / 4, -tiny / 8, 0.0], [largest, 0.0, 1.0], [-largest, 0.0, -1.0],
    ])
    spec = (1, -1), qmin, qmax, symmetric
    (own, own_scale, own_zero), (result, scale, zero) = WAYS[way](x, *spec), dynamic.fake_quantize(x, *spec)
    assert same_bits(own, result)
    assert same_bits(own_scale, scale)
    assert torch.equal(own_zero, zero)
    assert bool(own[0].isnan().all())
    assert bool(own[1:].isfinite().all())
    assert own[3].tolist() == [0.0, 0.0, 0.0]
    for row in (6, 7):  # what reaches to the end of float32 loses at most one step, for all codes must be finite
        assert float(own[row, 0] / x[row, 0]) == pytest.approx(1.0, abs=1 / 127)


@pytest.mark.parametrize("offset", [0.0, 5.0, -5.0])
def test_uint8_is_what_onnx_runtime_computes(offset):
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["codes", "scale", "zero"]),
        helper.make_node("DequantizeLinear", ["codes", "scale", "zero"], ["y"]),
    ]
    outputs = [("y", TensorProto.FLOAT), ("scale", TensorProto.FLOAT), ("zero", TensorProto.UINT8)]
    graph = helper.make_graph(
        nodes, "dynamic", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"])],
        [helper.make_tensor_value_info(name, kind, None) for name, kind in outputs],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    session, _ = create_session(model.SerializeToString())
    for seed in range(20):
        x = torch.randn(1000, generator=torch.Generator().manual_seed(seed)) * 10 ** (seed % 5 - 2) + offset
        theirs, scale, zero = session.run(None, {"x": x.numpy()})
        own, own_scale, own_zero = OP(x, (), 0, 255, False)
        assert own_scale.item() == float(scale)
        assert own_zero.item() == int(zero)
        assert torch.equal(own, torch.from_numpy(theirs))


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("codes", CODES)
def test_the_gradient_takes_the_range_for_a_constant(codes, granularity):
    qmin, qmax, symmetric = CODES[codes]
    sizes = GRANULARITIES[granularity].block_size(2)
    x = torch.randn(7, 50, generator=torch.Generator().manual_seed(5)) + 1
    grad = torch.randn(7, 50, generator=torch.Generator().manual_seed(6))
    _, scale, zero = OP(x, sizes, qmin, qmax, symmetric)
    steps = (x / scale).round() + (0 if symmetric else zero)
    inside = (steps >= qmin) & (steps <= qmax)
    x.requires_grad_()
    fake_quantize_dynamic(x, sizes, qmin, qmax, symmetric=symmetric).backward(grad)
    assert torch.equal(x.grad, torch.where(inside, grad, 0.0))


def test_only_the_result_carries_a_gradient():
    x = torch.randn(3, 4, requires_grad=True)
    result, scale, zero = OP(x, (1, -1), 0, 255, False)
    assert result.requires_grad
    assert not scale.requires_grad
    assert not zero.requires_grad
    with torch.no_grad():
        assert not OP(x, (1, -1), 0, 255, False)[0].requires_grad


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("codes", ["int8", "uint8"])
def test_compiled_is_eager(codes, granularity, backend):
    qmin, qmax, symmetric = CODES[codes]
    sizes = GRANULARITIES[granularity].block_size(2)

    def run(x):
        return fake_quantize_dynamic(x * 1.5, sizes, qmin, qmax, symmetric=symmetric)

    compiled = torch.compile(run, fullgraph=True, backend=backend)
    for seed in range(2):
        x = torch.randn(5, 33, generator=torch.Generator().manual_seed(seed), requires_grad=True)
        own, eager = compiled(x), run(x)
        assert torch.equal(own, eager)
        assert torch.equal(*(torch.autograd.grad(y.sum(), x)[0] for y in (own, eager)))


def test_op_is_registered_soundly():
    x = torch.randn(4, 6, requires_grad=True)
    torch.library.opcheck(OP, (x, [1, -1], 0, 255, False), test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(OP, (x.detach(), [], -128, 127, True))


def test_the_error_is_at_most_half_a_step():
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(7))
    for qmin, qmax, symmetric in CODES.values():
        own, scale, _ = OP(x, (1, -1), qmin, qmax, symmetric)
        # the zero point is rounded too, so that an end of the range may lie half a step further out
        assert float(((own - x).abs() / scale).max()) <= (0.5 if symmetric else 1.0) + 1e-3


def test_the_second_derivative_is_straight_through_too():
    x = torch.randn(4, 9, generator=torch.Generator().manual_seed(8), requires_grad=True)
    value = fake_quantize_dynamic(x, (1, -1), -128, 127, symmetric=True)
    slope, = torch.autograd.grad(value.pow(3).sum(), x, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(slope.sum(), x)[0], 6 * value.detach())


@pytest.mark.skipif(not backends()["cpu"].startswith("C++"), reason="the C++ kernels are not built")
@pytest.mark.parametrize("sizes", [(1, 0), (1, -2), (1, 5), (1,)], ids=str)
def test_blocks_that_do_not_divide_are_refused(sizes):
    with pytest.raises(ValueError, match="blocks of"):
        OP(torch.randn(4, 16), sizes, -8, 7, True)
