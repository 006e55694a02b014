import pytest
import torch

from qtk.core.dtypes import DTYPES, FloatDtype
from qtk.errors import SpecError
from qtk.numerics import minifloat
from qtk.ops.fake_quantize_float import fake_quantize_float

FORMATS = [name for name, row in DTYPES.items() if isinstance(row, FloatDtype)]
CASES = {
    "per_tensor": ((6, 8), (1,), []),
    "per_channel_conv": ((2, 4, 3, 5), (4,), [-1, 1, -1, -1]),
    "per_block": ((6, 8), (6, 2), [1, 4]),
    "empty": ((0, 8), (1,), []),
    "scalar": ((), (1,), []),
}
OP = torch.ops.qtk.fake_quantize_float.default


def arguments(case, kind=torch.float32):
    shape, qparams, block_size = CASES[case]
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(shape, generator=generator) * 9).to(kind).requires_grad_()
    return x, (torch.rand(qparams, generator=generator) + 0.2).requires_grad_(), block_size


@pytest.mark.parametrize("case", CASES)
def test_opcheck(case):
    torch.library.opcheck(OP, (*arguments(case), "fp4_e2m1"))


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
    assert torch.equal(scale.grad, dscale)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("case", ["per_tensor", "per_channel_conv", "per_block"])
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
