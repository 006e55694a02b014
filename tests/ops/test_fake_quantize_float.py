import pytest
import torch

from qtk.core.dtypes import DTYPES, FloatDtype
from qtk.errors import SpecError
from qtk.numerics import minifloat
from qtk.ops.fake_quantize_float import fake_quantize_float
from tests.kernels import conformance
from tests.numerics.small_floats import numbers

FORMATS = [name for name, row in DTYPES.items() if isinstance(row, FloatDtype)]
CASES = {
    "per_tensor": ((6, 8), (1,), []),
    "per_channel_conv": ((2, 4, 3, 5), (4,), [-1, 1, -1, -1]),
    "per_block": ((6, 8), (6, 2), [1, 4]),
    "empty": ((0, 8), (1,), []),
    "scalar": ((), (1,), []),
}
OP = torch.ops.qtk.fake_quantize_float.default
kernels = pytest.importorskip("qtk.kernels.gpu.fake_quantize")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # Triton's interpreter, at overflows and NaN
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def by_op(x, scale, block_size, format):
    return fake_quantize_float(x, scale, block_size, format.name)


def backward_by_op(grad, x, scale, block_size, format):
    x, scale = x.detach().requires_grad_(), scale.detach().requires_grad_()
    return torch.autograd.grad(fake_quantize_float(x, scale, block_size, format.name), (x, scale), grad)


def numbers_of(format):
    return format.exponent_bits, format.mantissa_bits, format.largest


def by_triton(x, scale, block_size, format):
    """Compiled on a GPU, else in Triton's interpreter."""
    return kernels.fake_quantize_float(x.to(DEVICE), scale.to(DEVICE), block_size, *numbers_of(format)).cpu()


def backward_by_triton(grad, x, scale, block_size, format):
    moved = [part.to(DEVICE) for part in (grad, x, scale)]
    found = kernels.fake_quantize_float_backward(*moved, block_size, *numbers_of(format), True)
    return [part.cpu() for part in found]


WAYS = {"op": (by_op, backward_by_op), "triton": (by_triton, backward_by_triton)}


def arguments(case, kind=torch.float32):
    shape, qparams, block_size = CASES[case]
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(shape, generator=generator) * 9).to(kind).requires_grad_()
    return x, (torch.rand(qparams, generator=generator) + 0.2).requires_grad_(), block_size


@pytest.mark.sample(4)
@pytest.mark.medium
@pytest.mark.parametrize("case", CASES)
def test_opcheck(case):
    torch.library.opcheck(OP, (*arguments(case), 2, 1, 6.0))


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("case", CASES)
def test_it_computes_the_reference_with_its_gradients(case, name, kind):
    x, scale, block_size = arguments(case, kind)
    result = fake_quantize_float(x, scale, block_size, name)
    expected = minifloat.fake_quantize(x.detach(), scale.detach(), block_size, DTYPES[name])
    assert torch.equal(result, expected)
    assert (result.dtype, result.stride()) == (kind, torch.empty_like(x).stride())
    grad = torch.randn(x.shape).to(kind)
    result.backward(grad)
    dx, dscale = minifloat.fake_quantize_backward(grad, x.detach(), scale.detach(), block_size, DTYPES[name])
    assert torch.equal(x.grad, dx)
    torch.testing.assert_close(scale.grad, dscale, rtol=1e-5, atol=1e-4)  # float32 sums of 120 terms, in any order


@pytest.mark.sample(15)
@pytest.mark.medium
@pytest.mark.pairwise(
    case=conformance.SHAPES, layout=conformance.LAYOUTS, kind=conformance.KINDS,
    name=["fp8_e5m2", "fp6_e2m3", "fp4_e2m1"], way=WAYS,
)
def test_kernels_compute_the_reference_in_every_layout(case, layout, kind, name, way):
    shape, block_size = conformance.SHAPES[case]
    forward, backward = WAYS[way]
    scale, _ = conformance.ranges(shape, block_size, None, -8, 7)
    x = conformance.values(shape, scale, kind)
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(kind)
    format, x = DTYPES[name], conformance.LAYOUTS[layout](x)
    result = forward(x, scale, block_size, format)
    expected = minifloat.fake_quantize(x, scale, block_size, format)
    assert conformance.same_bits(result, expected)
    assert result.stride() == torch.empty_like(x).stride()
    clean = x.nan_to_num(nan=0.5)
    dx, dscale = backward(grad, clean, scale, block_size, format)
    expected_dx, _ = minifloat.fake_quantize_backward(grad, clean, scale, block_size, format)
    assert conformance.same_bits(dx, expected_dx)
    conformance.check_sums(dscale, *_terms(grad, clean, scale, block_size, format))


def _terms(grad, x, scale, block_size, format):
    """What each element adds to the gradient of its scale, in float64, and the number of that scale."""
    index = conformance.owners(x.shape, block_size)
    steps = x.float() / scale.reshape(-1)[index]
    number = minifloat.round_to(steps, format)
    # beyond the largest number is what rounds to a larger one, if the format went on: from half a step on, ties to even
    last_step = format.largest - max(value for value in numbers(format) if value < format.largest)
    inside = steps.abs() < format.largest + last_step / 2
    return grad.double() * torch.where(inside, number - steps, number).double(), index


@pytest.mark.sample(2)
@pytest.mark.medium
@pytest.mark.parametrize(("case", "backend"), [
    ("per_tensor", "aot_eager"), ("per_channel_conv", "aot_eager"), ("per_block", "aot_eager"),
    ("per_channel_conv", "inductor"), pytest.param("per_tensor", "inductor", marks=pytest.mark.slow),
    pytest.param("per_block", "inductor", marks=pytest.mark.slow),
])
def test_compiled_without_a_break_it_is_the_same(case, backend):
    torch._dynamo.reset()
    x, scale, block_size = arguments(case)

    def loss(x, scale):
        return (fake_quantize_float(x, scale, block_size, "fp8_e4m3") * 3).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    expected = torch.autograd.grad(loss(x, scale), (x, scale))
    for own, other in zip(torch.autograd.grad(compiled(x, scale), (x, scale)), expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-3)  # sums of at most 120 terms below 10⁴


@pytest.mark.parametrize("layout", [lambda x: x.to(memory_format=torch.channels_last), lambda x: x[..., ::2]])
def test_the_layout_is_kept_and_the_numbers_do_not_depend_on_it(layout):
    x = torch.randn(2, 4, 6, 8)
    found = fake_quantize_float(layout(x), torch.tensor([0.3]), [], "fp6_e2m3")
    assert found.stride() == torch.empty_like(layout(x)).stride()
    assert torch.equal(found, layout(fake_quantize_float(x, torch.tensor([0.3]), [], "fp6_e2m3")))


def test_a_scale_that_does_not_fit_is_refused():
    with pytest.raises(SpecError, match="does not fit"):
        fake_quantize_float(torch.zeros(4, 4), torch.ones(3), [1, -1], "fp8_e4m3")


def test_the_second_derivative_is_straight_through_too():
    x, scale, block_size = arguments("per_channel_conv")
    fixed = scale.detach()

    def slope(x):
        return torch.autograd.grad(fake_quantize_float(x, fixed, block_size, "fp8_e4m3").pow(3).sum(), x,
                                   create_graph=True)[0]

    twice, = torch.autograd.grad(slope(x).sum(), x)
    value = fake_quantize_float(x, fixed, block_size, "fp8_e4m3").detach()
    torch.testing.assert_close(twice, 6 * value)  # nothing is clipped here


def test_second_derivatives_of_a_learned_scale_are_those_of_autograd_in_float64():
    """For fp4_e2m1, some of whose values are clamped: x̂ = x + scale · error inside, ± scale · 6 outside."""
    x, scale = torch.linspace(-9, 9, 37).requires_grad_(), torch.tensor([0.7], requires_grad=True)
    leaves, steps = (x, scale), (x.detach().double() / scale.detach().double())
    inside = steps.abs() < 6.9  # the next number would be 8, and a value at 7 goes there
    value = fake_quantize_float(x, scale, [], "fp4_e2m1").detach().double() / scale.detach().double()
    error = torch.where(inside, value - steps, value)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]

    def derivatives(result, leaves):
        first = torch.autograd.grad(result.pow(3).sum(), leaves, create_graph=True)
        return [*first, *torch.autograd.grad(first[0].square().sum() + first[1].sum(), leaves)]

    found = derivatives(fake_quantize_float(x, scale, [], "fp4_e2m1"), leaves)
    expected = derivatives(torch.where(inside, exact[0], 0.0) + exact[1] * error, exact)
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own.double(), other, rtol=1e-4, atol=1e-3)  # sums of 37 terms up to 10⁴
