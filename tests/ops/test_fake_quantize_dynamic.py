"""Fake-quantization with ranges taken at run time, as it runs here: against the formulas, and ONNX Runtime."""

import pytest
import torch
from onnx import TensorProto, helper

from qtk.kernels.backends import backends
from qtk.ops.fake_quantize_dynamic import fake_quantize_dynamic
from qtk.runtimes.session import create_session
from tests.kernels import dynamic_conformance
from tests.kernels.dynamic_conformance import CODES, GRANULARITIES

OP = torch.ops.qtk.fake_quantize_dynamic.default


class TestOp(dynamic_conformance.Conformance):
    backend = "op"
    fake_quantize = staticmethod(OP)


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


@pytest.mark.sample(3)
@pytest.mark.medium
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
