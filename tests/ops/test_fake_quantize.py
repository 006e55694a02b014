import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from qtk.errors import SpecError
from qtk.numerics import affine
from qtk.numerics.straight_through import fake_quantize_backward
from qtk.ops.fake_quantize import fake_quantize, with_range
from qtk.ops.fake_quantize_dynamic import fake_quantize_dynamic
from qtk.ops.fake_quantize_float import fake_quantize_float

CASES = {  # shape, scale shape, block size
    "per_tensor": ((6, 8), (1,), []),
    "per_channel": ((6, 8), (6,), [1, -1]),
    "per_channel_conv": ((2, 4, 3, 5), (4,), [-1, 1, -1, -1]),
    "per_block": ((6, 8), (6, 2), [1, 4]),
    "empty": ((0, 8), (1,), []),
    "scalar": ((), (1,), []),
}
ZERO_POINTS = {"symmetric": None, "int32": torch.int32, "learned": torch.float32}


def arguments(case, zero_point, *, grad=True, kind=torch.float32):
    shape, qparams, block_size = CASES[case]
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(shape, generator=generator) * 2).to(kind).requires_grad_(grad)
    scale = (torch.rand(qparams, generator=generator) * 0.2 + 0.1).requires_grad_(grad)
    zero = None if zero_point is None else torch.randint(-3, 4, qparams, generator=generator).to(zero_point)
    if zero is not None and zero.is_floating_point():
        zero.requires_grad_(grad)
    return x, scale, zero, block_size, -8, 7


@pytest.mark.sample(4)
@pytest.mark.medium
@pytest.mark.parametrize("zero_point", ZERO_POINTS.values(), ids=ZERO_POINTS)
@pytest.mark.parametrize("case", CASES)
def test_opcheck(case, zero_point):
    torch.library.opcheck(torch.ops.qtk.fake_quantize.default, arguments(case, zero_point))


@pytest.mark.medium
@pytest.mark.parametrize("wants", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("case", CASES)
def test_opcheck_of_the_backward(case, wants):
    x, scale, zero, *spec = arguments(case, torch.int32, grad=False)
    torch.library.opcheck(
        torch.ops.qtk.fake_quantize_backward.default, (torch.ones_like(x), x, scale, zero, *spec, *wants)
    )


@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("zero_point", ZERO_POINTS.values(), ids=ZERO_POINTS)
@pytest.mark.parametrize("case", CASES)
def test_it_computes_the_reference(case, zero_point, grad, context):
    given = arguments(case, zero_point, grad=grad)
    with context():
        result = fake_quantize(*given)
    assert torch.equal(result, affine.fake_quantize(*given))
    assert result.requires_grad == (grad and context is torch.enable_grad)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_every_gradient_is_the_reference(case, kind):
    x, scale, zero, *spec = arguments(case, torch.float32, kind=kind)
    result = fake_quantize(x, scale, zero, *spec)
    slope = torch.randn(result.shape).to(kind)
    result.backward(slope)
    expected = fake_quantize_backward(slope, x, scale, zero, *spec, wants_scale=True, wants_zero_point=True)
    assert torch.equal(x.grad, expected[0])
    for own, other in zip((scale.grad, zero.grad), expected[1:], strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-5)  # sums of at most 120 terms below 10


@pytest.mark.parametrize("needed", [(True, False, False), (False, True, False), (False, False, True)])
def test_each_gradient_comes_alone(needed):
    x, scale, zero, *spec = arguments("per_channel", torch.float32, grad=False)
    leaves = (x, scale, zero)
    for leaf, need in zip(leaves, needed, strict=True):
        leaf.requires_grad_(need)
    fake_quantize(*leaves, *spec).sum().backward()
    assert tuple(leaf.grad is not None for leaf in leaves) == needed


def test_work_for_unneeded_gradients_is_not_done():
    x, scale, zero, *spec = arguments("per_tensor", torch.int32, grad=False)
    x.requires_grad_()
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.qtk.fake_quantize_backward.default:
                seen.append(args[-2:])
            return function(*args, **(kwargs or {}))

    result = fake_quantize(x, scale, zero, *spec)
    with Watch():
        result.sum().backward()
    assert seen == [(False, False)]


@pytest.mark.sample(2)
@pytest.mark.medium
@pytest.mark.parametrize("zero_point", ZERO_POINTS.values(), ids=ZERO_POINTS)
@pytest.mark.parametrize("case", ["per_tensor", "per_channel_conv", "per_block"])
def test_compiled_without_a_break_it_is_the_same_with_its_gradients(case, zero_point):
    torch._dynamo.reset()
    x, scale, zero, *spec = arguments(case, zero_point)
    leaves = [leaf for leaf in (x, scale, zero) if leaf is not None and leaf.requires_grad]

    def loss(x, scale, zero):
        return (fake_quantize(x, scale, zero, *spec) * 3).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(loss(x, scale, zero), leaves)
    for own, other in zip(torch.autograd.grad(compiled(x, scale, zero), leaves), expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-4)  # sums of at most 120 terms below 100


class Net(nn.Module):
    def forward(self, x, scale):
        return fake_quantize(x, scale, None, [1, -1], -8, 7) + 1


class PerTensorNet(nn.Module):
    def forward(self, x, scale):
        return fake_quantize(x.relu(), scale, None, [], -8, 7)


def test_exported_with_a_dynamic_batch_it_is_one_node():
    batch = torch.export.Dim.AUTO
    program = torch.export.export(PerTensorNet(), (torch.randn(4, 3), torch.ones(1)), dynamic_shapes=({0: batch}, None))
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert torch.ops.qtk.fake_quantize.default in targets
    for size in (1, 9):
        x = torch.randn(size, 3)
        assert torch.equal(program.module()(x, torch.tensor([0.2])), PerTensorNet()(x, torch.tensor([0.2])))


def test_make_fx_sees_the_op_with_and_without_grad():
    for grad in (True, False):
        x, scale = torch.randn(3, 4, requires_grad=grad), torch.rand(3) + 0.1
        graph = make_fx(Net())(x, scale).graph
        first = next(node for node in graph.nodes if node.op == "call_function")
        assert first.target is torch.ops.qtk.fake_quantize.default


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_autocast_leaves_the_dtype_alone(kind):
    x = torch.randn(5, 7, dtype=kind)
    scale = torch.tensor([0.013])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = fake_quantize(x, scale, None, [], -128, 127)
    assert result.dtype == kind
    assert torch.equal(result, affine.fake_quantize(x, scale, None, [], -128, 127))


def test_layout_and_dtype_of_the_fake_kernel_are_the_real_ones():
    last = torch.randn(2, 4, 3, 5).to(memory_format=torch.channels_last)
    for x in (last, torch.randn(4, 6).t(), torch.randn(4, 6)[:, ::2]):
        real = fake_quantize(x, torch.ones(1), None, [], -8, 7)
        fake = fake_quantize(x.to("meta"), torch.ones(1, device="meta"), None, [], -8, 7)
        assert (fake.shape, fake.dtype) == (real.shape, real.dtype)
        assert real.stride() == torch.empty_like(x).stride()


def test_dx_is_differentiable_again():
    x, scale = torch.tensor([0.3, 9.0], requires_grad=True), torch.ones(1)
    slope = torch.tensor([2.0, 3.0], requires_grad=True)
    dx, = torch.autograd.grad(fake_quantize(x, scale, None, [], -8, 7), x, slope, create_graph=True)
    again, = torch.autograd.grad((dx * torch.tensor([5.0, 7.0])).sum(), slope)
    assert again.tolist() == [5.0, 0.0]


class Round(torch.autograd.Function):
    """Rounds exactly, so that a code at the edge of the range stays there; its gradient is 1."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad.clone()


class ClampStraight(torch.autograd.Function):
    """Clamps; its gradient is 1 everywhere."""

    @staticmethod
    def forward(ctx, x, low, high):
        return x.clamp(low, high)

    @staticmethod
    def backward(ctx, grad):
        return grad.clone(), None, None


def brute_force(x, scale, zero, block_size, qmin, qmax):
    """LSQ+ by autograd: clamp, and a round whose gradient is 1."""
    sizes = block_size or [-1] * x.ndim
    shape = [length if size == 1 else 1 for length, size in zip(x.shape, sizes, strict=True)]
    step, offset = scale.abs().reshape(shape), 0.0
    if zero is not None:
        offset = Round.apply(ClampStraight.apply(zero, qmin, qmax)).reshape(shape)
    code = Round.apply(x / step) + offset
    code = torch.where((code >= qmin) & (code <= qmax), code, code.detach().clamp(qmin, qmax))
    return (code - offset) * step


@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize("case", ["per_tensor", "per_channel", "per_channel_conv", "scalar"])
@pytest.mark.parametrize("zero_point", ["symmetric", "learned"])
def test_first_and_second_derivatives_of_a_learned_range_are_those_of_lsq_plus_in_float64(case, zero_point, negative):
    x, scale, zero, *spec = arguments(case, ZERO_POINTS[zero_point])
    if negative:
        scale = (-scale).detach().requires_grad_()
    leaves = [leaf for leaf in (x, scale, zero) if leaf is not None]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact_zero = exact[2] if zero is not None else None
    generator = torch.Generator().manual_seed(1)
    upstream = torch.randn(x.shape, generator=generator).requires_grad_()
    of_grads = [torch.randn(leaf.shape, generator=generator) for leaf in leaves]
    exact_upstream = upstream.detach().double().requires_grad_()

    def derivatives(result, leaves, upstream, of_grads):
        first = torch.autograd.grad(result, leaves, upstream, create_graph=True)
        weighted = sum((grad * weight).sum() for grad, weight in zip(first, of_grads, strict=True))
        second = torch.autograd.grad(weighted, [*leaves, upstream], allow_unused=True, materialize_grads=True)
        return [*first, *second]

    found = derivatives(fake_quantize(x, scale, zero, *spec), leaves, upstream, of_grads)
    expected = derivatives(
        brute_force(exact[0], exact[1], exact_zero, *spec), exact, exact_upstream, [g.double() for g in of_grads]
    )
    assert float(expected[-1].abs().max()) > 0
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own.double(), other, rtol=1e-5, atol=1e-5)  # sums of at most 30 terms below 10


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("derivative", [torch.func.jacfwd, torch.func.hessian])
@pytest.mark.parametrize("quantize", [
    lambda x: fake_quantize(x * 1, torch.ones(1), None, [], -8, 7),
    lambda x: fake_quantize(x, torch.ones(1), torch.zeros(1), [], -8, 7),
    lambda x: fake_quantize_dynamic(x, [], -8, 7, symmetric=True),
    lambda x: fake_quantize_float(x, torch.ones(1), [], "fp4_e2m1"),
    lambda x: fake_quantize_float(torch.ones(5), x[:1], [], "fp4_e2m1"),
], ids=["value", "zero point", "dynamic", "float", "float scale"])
def test_forward_mode_has_no_derivatives(derivative, quantize):
    with pytest.raises(RuntimeError, match=r"forward mode|autograd\.Function with functorch"):
        derivative(lambda x: quantize(x).pow(2).sum())(torch.randn(5))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap():
    x = torch.randn(3, 4)
    result = torch.vmap(lambda row: fake_quantize(row, torch.ones(1), None, [], -8, 7))(x)
    assert torch.equal(result, affine.fake_quantize(x, torch.ones(1), None, [], -8, 7))


@pytest.mark.parametrize("trained", ["nothing", "parameter", "value", "range"])
@pytest.mark.parametrize(("scales", "zero_points"), [(3, None), (3, 3), (4, 1), (4, 5)])
def test_scales_and_zero_points_that_do_not_fit_are_refused(scales, zero_points, trained):
    x = torch.zeros(4, 4, requires_grad=trained in ("parameter", "value"))
    scale = torch.ones(scales, requires_grad=trained == "range")
    zero = None if zero_points is None else torch.zeros(zero_points)
    with pytest.raises(SpecError, match="does not fit"):
        fake_quantize(x * 1 if trained == "value" else x, scale, zero, [1, -1], -8, 7)


class Seen(TorchDispatchMode):
    """Notes the operators that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("zero_point", [None, torch.tensor([3], dtype=torch.int32)], ids=str)
def test_with_range_is_the_operator(zero_point):
    x, scale = torch.randn(3, 5), torch.tensor([0.1])
    given = scale, zero_point, (), 0, 15
    bound, wanted = with_range(*given), fake_quantize(x, *given)
    for value in (x, x.t().contiguous().t(), nn.Parameter(x)):
        with torch.no_grad():
            assert torch.equal(bound(value), wanted)
    for kind in (torch.bfloat16, torch.float64):
        assert torch.equal(bound(x.to(kind)), fake_quantize(x.to(kind), *given))
    with Seen() as seen:
        assert torch.equal(bound(x), wanted)
    assert "qtk.fake_quantize.default" in seen.names
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert bound(mode.from_tensor(x)).shape == x.shape
    assert torch.equal(torch.vmap(bound)(x), wanted)
    scale.mul_(2)
    assert torch.equal(bound(x), fake_quantize(x, *given))


def test_with_range_refuses_what_does_not_fit_as_the_operator_does():
    bound = with_range(torch.ones(4), None, (-1, 1), -8, 7)
    with pytest.raises(ValueError, match="4 scales for 3 blocks"):
        bound(torch.ones(2, 3))
    for wrong in ((), (torch.ones(2, 4), 1), (3.0,)):
        with pytest.raises((TypeError, AttributeError, RuntimeError)):
            bound(*wrong)
