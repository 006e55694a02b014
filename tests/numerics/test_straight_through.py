import pytest
import torch

from qtk.core.granularity import PerBlock, PerChannel, PerTensor
from qtk.numerics import blocks
from qtk.numerics.straight_through import fake_quantize_backward

LAYOUTS = [
    (PerTensor(), (5, 13)), (PerTensor(), ()), (PerChannel(0), (7, 13)), (PerChannel(-1), (2, 3, 5)),
    (PerChannel(1), (2, 3, 4, 5)), (PerChannel(0), (9,)), (PerBlock((1, 4)), (3, 8)), (PerBlock((2, -1)), (6, 11)),
    (PerBlock((1, 1)), (2, 3)), (PerBlock((-1, 2, -1, 1)), (2, 4, 3, 5)),
]


def ste_round(v):
    return v + (v.round() - v).detach()


def plain(x, scale, zero_point, granularity, qmin, qmax):
    """The formula as autograd sees it, in float64, with every scale spread over its elements by indexing."""
    owners = torch.arange(scale.numel()).reshape(scale.shape)
    match granularity:
        case PerTensor():
            owners = owners.expand(x.shape) if x.ndim else owners.reshape(())
        case PerChannel(axis):
            owners = owners.reshape([-1 if i == axis % x.ndim else 1 for i in range(x.ndim)]).expand(x.shape)
        case PerBlock(sizes):
            for axis, size in enumerate(sizes):
                owners = owners.repeat_interleave(x.shape[axis] if size == -1 else size, dim=axis)
    step, zero = scale.reshape(-1)[owners], ste_round(zero_point).reshape(-1)[owners]
    code = ste_round(x / step) + zero
    # torch.clamp passes no gradient at its bounds; the outermost codes are codes
    code = torch.where((code >= qmin) & (code <= qmax), code, code.detach().clamp(qmin, qmax))
    return (code - zero) * step


def case(granularity, shape, seed=0):
    """Numbers for which float32 is exact, so that ties and the edges of the codes mean the same in float64."""
    generator = torch.Generator().manual_seed(seed)
    qparams = granularity.qparam_shape(shape)
    scale = 2.0 ** torch.randint(-2, 2, qparams, generator=generator)
    x = torch.randint(-200, 200, shape, generator=generator) / 16
    zero_point = torch.randint(-5, 6, qparams, generator=generator) / 2
    grad = torch.randint(-8, 9, shape, generator=generator) / 4
    return x, scale, zero_point, grad


@pytest.mark.parametrize("piece", [7, 1 << 17])
@pytest.mark.parametrize(("granularity", "shape"), LAYOUTS, ids=str)
def test_gradients_are_those_of_the_plain_formula(monkeypatch, granularity, shape, piece):
    monkeypatch.setattr(blocks, "PIECE", piece)
    x, scale, zero_point, grad = case(granularity, shape)
    wide = [tensor.double().requires_grad_() for tensor in (x, scale, zero_point)]
    expected = torch.autograd.grad(plain(*wide, granularity, -8, 7), wide, grad.double())
    ours = fake_quantize_backward(
        grad, x, scale, zero_point, granularity.block_size(x.ndim), -8, 7, wants_scale=True, wants_zero_point=True
    )
    for own, other in zip(ours, expected, strict=True):
        assert own.dtype == torch.float32
        assert own.tolist() == other.float().tolist()


@pytest.mark.parametrize(("granularity", "shape"), LAYOUTS, ids=str)
def test_symmetric_and_only_x(granularity, shape):
    x, scale, _, grad = case(granularity, shape, seed=3)
    wide = [x.double().requires_grad_(), scale.double().requires_grad_()]
    real = plain(*wide, torch.zeros_like(scale).double(), granularity, -8, 7)
    dx, dscale = torch.autograd.grad(real, wide, grad.double())
    block_size = granularity.block_size(x.ndim)
    alone = fake_quantize_backward(grad, x, scale, None, block_size, -8, 7, wants_scale=False, wants_zero_point=False)
    assert alone[0].tolist() == dx.float().tolist()
    assert [each.numel() for each in alone[1:]] == [0, 0]
    both = fake_quantize_backward(grad, x, scale, None, block_size, -8, 7, wants_scale=True, wants_zero_point=False)
    assert both[1].tolist() == dscale.float().tolist()


def test_the_outermost_codes_are_inside():
    x = torch.tensor([-9.0, -8.5, -8.4, 7.4, 7.5, 8.0])  # codes -9, -8 (half to even), -8, 7, 8, 8
    dx, _, _ = fake_quantize_backward(
        torch.ones(6), x, torch.ones(1), None, (), -8, 7, wants_scale=False, wants_zero_point=False
    )
    assert dx.tolist() == [0, 1, 1, 1, 0, 0]


def test_infinities_and_nan_give_no_gradient_to_x_and_none_leaks_into_the_scale():
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 1.0])
    grad = torch.tensor([1.0, 1.0, 1.0, torch.inf])
    dx, _, _ = fake_quantize_backward(
        grad, x, torch.ones(1), None, (), -8, 7, wants_scale=False, wants_zero_point=False
    )
    assert dx.tolist() == [0, 0, 0, torch.inf]
    _, dscale, dzero = fake_quantize_backward(
        torch.ones(2), x[:2], torch.ones(1), torch.zeros(1), (), -8, 7, wants_scale=True, wants_zero_point=True
    )
    assert dscale.tolist() == [-1.0]
    assert dzero.tolist() == [-2.0]
    _, dscale, _ = fake_quantize_backward(
        torch.ones(4), x, torch.ones(1), None, (), -8, 7, wants_scale=True, wants_zero_point=False
    )
    assert dscale.isnan().all()


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_float32(kind):
    x, grad = torch.full((4096,), 100.0, dtype=kind), torch.full((4096,), 0.01, dtype=kind)
    dx, dscale, _ = fake_quantize_backward(
        grad, x, torch.ones(1), None, (), -8, 7, wants_scale=True, wants_zero_point=False
    )
    assert dx.dtype == kind
    assert dscale.dtype == torch.float32
    assert float(dscale) == pytest.approx(4096 * 7 * float(torch.tensor(0.01, dtype=kind)), rel=1e-6)


def test_dx_lies_as_x_lies():
    x = torch.randn(2, 4, 3, 5).to(memory_format=torch.channels_last)
    grad = torch.ones(()).expand(x.shape)
    dx, _, _ = fake_quantize_backward(
        grad, x, torch.ones(1), None, (), -8, 7, wants_scale=False, wants_zero_point=False
    )
    assert dx.stride() == x.stride()
    assert torch.equal(dx, torch.ones_like(x))
