import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from qtk.kernels.backends import load_native
from qtk.ops.fake_quantize import fake_quantize
from qtk.ops.fake_quantize_residual import saves_residual
from tests.ops.test_fake_quantize import CASES, ZERO_POINTS, arguments

SPEC = ([], -8, 7)
SCALE = torch.tensor([0.25])


@pytest.mark.medium
@pytest.mark.sample(8)
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("zero_point", ZERO_POINTS.values(), ids=ZERO_POINTS)
@pytest.mark.parametrize("case", CASES)
def test_opcheck(case, zero_point, learned):
    given = arguments(case, zero_point, grad=False)
    torch.library.opcheck(torch.ops.qtk.fake_quantize_with_residual.default, (*given, learned))
    _, residual = torch.ops.qtk.fake_quantize_with_residual.default(*given, learned)
    wants = (learned, learned and zero_point is not None)
    torch.library.opcheck(
        torch.ops.qtk.fake_quantize_residual_backward.default,
        (torch.ones_like(given[0]), residual, *given[1:], *wants),
    )


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("zero_point", ZERO_POINTS.values(), ids=ZERO_POINTS)
@pytest.mark.parametrize("case", CASES)
def test_of_a_value_gradients_are_those_of_a_parameter(case, zero_point, kind, grad):
    """A parameter is saved as it is."""
    x, scale, zero, *spec = arguments(case, zero_point, grad=grad, kind=kind)
    x.requires_grad_()
    leaves = [leaf for leaf in (x, scale, zero) if leaf is not None and leaf.requires_grad]
    slope = torch.randn(x.shape).to(kind)
    value = x * 1
    assert saves_residual(value, scale, zero)
    assert not saves_residual(x, scale, zero)
    result, exact = fake_quantize(value, scale, zero, *spec), fake_quantize(x, scale, zero, *spec)
    assert torch.equal(result, exact)
    of_x, *of_range = torch.autograd.grad(result, leaves, slope)
    exact_of_x, *exact_of_range = torch.autograd.grad(exact, leaves, slope)
    assert torch.equal(of_x, exact_of_x)
    bound = float(slope.abs().float().sum()) / 131060 + 1e-5  # of the sums, at most 120 terms below 10
    for own, other in zip(of_range, exact_of_range, strict=True):
        assert own.shape == other.shape
        torch.testing.assert_close(own, other, rtol=1e-5, atol=bound)


@pytest.mark.parametrize("learned", [False, True])
def test_of_a_value_all_derivatives_are_those_of_a_parameter(learned):
    """Of the cube, whose derivatives of any order are not 0."""

    def third(prepare):
        x = torch.tensor([0.3, 0.7, 1.1, 9.0], requires_grad=True)
        result = fake_quantize(prepare(x), SCALE.clone().requires_grad_(learned), None, *SPEC)
        first, = torch.autograd.grad(result.pow(3).sum(), x, create_graph=True)
        second, = torch.autograd.grad(first.pow(3).sum(), x, create_graph=True)
        return second.detach(), torch.autograd.grad(second.sum(), x)[0]

    for own, exact in zip(third(lambda x: x * 1), third(lambda x: x), strict=True):
        assert torch.equal(own, exact)
        assert own[:3].all()


def saved_bytes(run):
    """Bytes a value that the graph of ``run`` keeps."""
    sizes = []
    with saved_tensors_hooks(lambda tensor: sizes.append(tensor.nbytes) or tensor, lambda tensor: tensor):
        run()
    return sum(sizes)


@pytest.mark.parametrize(("learned", "expected"), [(False, 1000), (True, 2000)])
def test_one_or_two_bytes_of_a_value_are_saved(learned, expected):
    scale = SCALE.clone().requires_grad_(learned)
    value = torch.randn(1000, requires_grad=True) * 1
    assert saved_bytes(lambda: fake_quantize(value, scale, None, *SPEC)) - scale.nbytes == expected


def of_relu(value, scale=SCALE):
    return fake_quantize(value.relu(), scale, None, *SPEC)


@pytest.mark.parametrize("learned", [False, True])
def test_the_result_of_a_relu_is_freed_and_its_gradient_the_same(learned):
    scale = SCALE.clone().requires_grad_(learned)
    x = torch.randn(1000, requires_grad=True)
    x.data[:4] = torch.tensor([0.0, -0.0, 1e-3, torch.nan])
    value = (x * 1).relu()
    storage = StorageWeakRef(value.untyped_storage())
    result = fake_quantize(value, scale, None, *SPEC)
    del value
    assert storage.expired()
    slope = torch.randn(1000)
    of_x, = torch.autograd.grad(result, x, slope, retain_graph=True)
    exact, = torch.autograd.grad(torch.ops.qtk.fake_quantize.default((x * 1).relu(), SCALE, None, *SPEC), x, slope)
    assert torch.equal(of_x, exact)
    assert torch.equal(torch.autograd.grad(result, x, slope)[0], exact)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(result, x, slope)


def test_what_an_op_saves_for_itself_is_saved_once():
    value = torch.randn(1000, requires_grad=True).sigmoid()
    storage = value.untyped_storage().data_ptr()
    kept = []
    with saved_tensors_hooks(lambda tensor: kept.append(tensor.untyped_storage().data_ptr()) or tensor, lambda x: x):
        fake_quantize(value, SCALE, None, *SPEC)
    assert storage in kept
    assert len(kept) == 2


def test_a_relu_that_others_read_too_has_the_sum_of_both_gradients():
    x = torch.randn(100, requires_grad=True)
    value = x.relu()
    value.register_hook(lambda grad: grad * 2)
    of_x, = torch.autograd.grad((fake_quantize(value, SCALE, None, *SPEC) + value.square()).sum(), x)
    inside = (x > 0) & (x <= 1.875)
    assert torch.equal(of_x, 2 * (inside.float() + 2 * x.clamp(min=0)).detach())


def test_a_relu_that_was_written_in_place_is_told_of_as_by_autograd():
    value = torch.randn(100, requires_grad=True).relu()
    with torch.no_grad():
        value.neg_()
    result = fake_quantize(value, SCALE, None, *SPEC)
    with pytest.raises(RuntimeError, match="inplace"):
        result.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_saves_nothing_and_gives_the_same(reentrant):
    x = torch.randn(1000, requires_grad=True)
    slope = torch.randn(1000)
    expected, = torch.autograd.grad(of_relu(x * 1), x, slope)
    of_x, = torch.autograd.grad(checkpoint(of_relu, x, use_reentrant=False), x, slope)
    assert torch.equal(of_x, expected)
    if reentrant:
        checkpoint(of_relu, x, use_reentrant=True).backward(slope)
        assert torch.equal(x.grad, expected)
    else:
        assert saved_bytes(lambda: checkpoint(of_relu, x, use_reentrant=False)) <= x.nbytes


def test_a_checkpoint_runs_twice_the_second_time_in_the_backward_pass():
    calls = []

    def counted(x):
        calls.append(x)
        return of_relu(x * 1)

    result = checkpoint(counted, torch.randn(10, requires_grad=True), use_reentrant=False)
    assert len(calls) == 1
    result.sum().backward()
    assert len(calls) == 2


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.skipif(load_native() is not None, reason="torch.library's autograd, without the C++ one, knows none")
def test_function_transforms_see_the_plain_op():
    x = torch.randn(4, 10)

    def loss(row):
        return (of_relu(row * 1) * row).sum()

    alone = torch.stack([torch.autograd.functional.jacobian(loss, row) for row in x])
    assert torch.equal(torch.func.vmap(torch.func.grad(loss))(x), alone)


def test_dx_is_differentiable_again():
    x = torch.tensor([-1.0, 0.3, 9.0], requires_grad=True)
    slope = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    dx, = torch.autograd.grad(of_relu(x * 1), x, slope, create_graph=True)
    again, = torch.autograd.grad((dx * torch.tensor([4.0, 5.0, 7.0])).sum(), slope)
    assert again.tolist() == [0.0, 5.0, 0.0]


def straight_through(x, scale, zero, block_size, qmin, qmax):
    """The formula in float64, as autograd sees it."""
    sizes = block_size or [-1] * x.ndim
    shape = [length if size == 1 else 1 for length, size in zip(x.shape, sizes, strict=True)]
    step = scale.abs().reshape(shape)
    zero = torch.zeros_like(scale) if zero is None else zero
    offset = (zero + (zero.clamp(qmin, qmax).round() - zero).detach()).reshape(shape)
    steps = x / step
    code = (steps + (steps.float().round() - steps).detach()) + offset
    clipped = code.detach().round().clamp(qmin, qmax)
    inside = code.detach().round() == clipped
    return (torch.where(inside, code, clipped) - offset) * step


@pytest.mark.parametrize("zero_point", ["symmetric", "learned"])
@pytest.mark.parametrize("case", ["per_tensor", "per_channel", "per_channel_conv", "scalar"])
def test_second_derivatives_of_a_learned_range_are_those_of_the_formula_in_float64(case, zero_point):
    x, scale, zero, *spec = arguments(case, ZERO_POINTS[zero_point])
    scale = (-scale).detach().requires_grad_()
    leaves = [leaf for leaf in (x, scale, zero) if leaf is not None]
    generator = torch.Generator().manual_seed(1)
    slope, *weights = (torch.randn(leaf.shape, generator=generator) for leaf in (x, *leaves))

    def derivatives(function, leaves, slope, weights):
        slope = slope.requires_grad_()
        first = torch.autograd.grad(function(*leaves), leaves, slope, create_graph=True)
        weighted = sum((grad * weight).sum() for grad, weight in zip(first, weights, strict=True))
        return [*first, *torch.autograd.grad(weighted, [*leaves, slope], materialize_grads=True)]

    found = derivatives(
        lambda x, scale, zero=None: fake_quantize(x * 1, scale, zero, *spec), leaves, slope, weights
    )
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = derivatives(
        lambda x, scale, zero=None: straight_through(x, scale, zero, *spec), exact, slope.detach().double(),
        [weight.double() for weight in weights],
    )
    assert float(expected[-1].detach().abs().max()) > 0
    for own, other in zip(found, expected, strict=True):
        bound = 1e-5 + 120 * 5 / 131060  # the distance to the code, of at most 120 terms
        torch.testing.assert_close(own.double(), other, rtol=1e-5, atol=bound)
