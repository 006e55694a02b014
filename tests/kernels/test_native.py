"""The C++ kernels, checked as ``conformance`` says. Without them the reference runs, which has tests of its own."""

import pytest
import torch

import qtk
from qtk.kernels.backends import load_native
from tests.kernels import conformance

pytestmark = pytest.mark.skipif(load_native() is not None, reason=f"C++ kernels: {load_native()}")

forward = torch.ops.qtk.fake_quantize.default
backward = torch.ops.qtk.fake_quantize_backward.default


class TestNative(conformance.Conformance):
    forward = staticmethod(forward)
    backward = staticmethod(backward)


class TestResidual(conformance.ResidualConformance):
    with_residual = staticmethod(torch.ops.qtk.fake_quantize_with_residual.default)
    residual_backward = staticmethod(torch.ops.qtk.fake_quantize_residual_backward.default)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=str)
def test_every_number_of_half_precision(kind):
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(kind)
    for scale in (1.0, 0.1, 1e-7, 1e4, 3.0, 257.0, 1e36, torch.inf):  # of multiples of 3 and 257 many are ties
        spec = (torch.tensor([scale]), None, ((), -32768, 32767))
        conformance.check_forward(forward, x, *spec)


@pytest.mark.parametrize("zero_point", conformance.ZERO_POINTS, ids=str)
@pytest.mark.parametrize("kind", conformance.KINDS, ids=str)
def test_columns_of_every_width(kind, zero_point):
    """More columns than are taken at a time and fewer, an odd number and an even one, of few rows and of many."""
    for shape in ((3, 1030), (4, 1030), (5, 1029), (9, 33), (9, 34), (5, 1024), (70, 513)):
        scale, zero = conformance.ranges(shape, (-1, 1), zero_point, -8, 7)
        x = conformance.values(shape, scale, kind)
        conformance.check_forward(forward, x, scale, zero, ((-1, 1), -8, 7))
        grad = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(kind)
        conformance.check_backward(backward, grad, x.nan_to_num(nan=0.5), scale, zero, ((-1, 1), -8, 7))


@pytest.mark.parametrize("kind", conformance.KINDS, ids=str)
def test_every_nan_stays_one(kind):
    nans = torch.tensor([0x7FFFFFFF, 0x7FFF8000, 0x7F800001, 0x7FC00000], dtype=torch.int32).view(torch.float32)
    for scale in nans:
        assert forward(torch.ones(100, dtype=kind), scale.reshape(1), None, [], -8, 7).isnan().all()
    bits = {2: torch.int16, 4: torch.int32}[kind.itemsize]
    for x in (torch.tensor([-1], dtype=bits).view(kind), torch.tensor([torch.iinfo(bits).max], dtype=bits).view(kind)):
        assert forward(x.expand(100), torch.ones(1), None, [], -8, 7).isnan().all()


def test_a_gradient_of_another_dtype_or_spread_out():
    x, scale = torch.randn(37, 1031), torch.rand(37) + 0.1
    for grad in (torch.randn(37, 1031).bfloat16(), torch.ones(()).expand(37, 1031), torch.randn(37, 1).expand_as(x)):
        conformance.check_backward(backward, grad, x, scale, None, ((1, -1), -8, 7))


def test_a_nan_gets_no_gradient_and_spoils_that_of_the_scale():
    x = torch.tensor([[torch.nan, 1.0], [1.0, 2.0]])
    dx, dscale, _ = backward(torch.ones(2, 2), x, torch.ones(2), None, [1, -1], -8, 7, True, False)
    assert dx.tolist() == [[0, 1], [1, 1]]
    assert dscale.isnan().tolist() == [True, False]


def test_what_it_is_given_is_left_alone():
    given = torch.randn(6, 8), torch.rand(6) + 0.1, torch.rand(6) * 4
    before = [tensor.clone() for tensor in given]
    forward(*given, [1, -1], -8, 7)
    backward(given[0], *given, [1, -1], -8, 7, True, True)
    assert all(torch.equal(own, other) for own, other in zip(given, before, strict=True))


def test_double_precision_is_computed_in_float32_as_the_reference_does():
    x = torch.randn(1000, dtype=torch.float64)
    own = forward(x, torch.tensor([0.1]), None, [], -8, 7)
    assert own.dtype == torch.float64
    assert torch.equal(own, qtk.numerics.affine.fake_quantize(x, torch.tensor([0.1]), None, (), -8, 7))


@pytest.mark.parametrize("case", ["tensor_large", "channel_first", "channel_last_wide", "block_tiles", "block_rows"])
def test_sums_do_not_depend_on_the_number_of_threads(case):
    shape, block_size = conformance.SHAPES[case]
    shape = (shape[0] * 60, *shape[1:])
    scale, zero = conformance.ranges(shape, block_size, torch.float32, -8, 7)
    x, grad = conformance.values(shape, scale, torch.float32).nan_to_num(), torch.randn(shape)
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(backward(grad, x, scale, zero, block_size, -8, 7, True, True))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(own, same) for own, same in zip(found[0], other, strict=True))


def test_residuals_that_do_not_fit_are_refused():
    given = torch.zeros(4, 6), torch.zeros(4, 6, dtype=torch.int8), torch.ones(1), None, [], -8, 7
    op = torch.ops.qtk.fake_quantize_residual_backward.default
    with pytest.raises(ValueError, match="learned range"):
        op(*given, True, False)
    with pytest.raises(ValueError, match="gradient of shape"):
        op(torch.zeros(4, 5), *given[1:], False, False)
    with pytest.raises(TypeError, match="int8 or int16"):
        op(given[0], given[0], *given[2:], False, False)


@pytest.mark.parametrize("block_size", [[1, 5], [3, -1], [1], [1, 0]])
def test_blocks_that_do_not_fit_are_refused_before_memory_is_touched(block_size):
    with pytest.raises(ValueError, match="block"):
        forward(torch.zeros(4, 6), torch.ones(4), None, block_size, -8, 7)
    with pytest.raises(ValueError, match="block"):
        backward(torch.zeros(4, 6), torch.zeros(4, 6), torch.ones(4), None, block_size, -8, 7, True, False)


def test_scales_and_gradients_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="3 scales for 4 blocks"):
        forward(torch.zeros(4, 6), torch.ones(3), None, [1, -1], -8, 7)
    with pytest.raises(ValueError, match="zero points"):
        forward(torch.zeros(4, 6), torch.ones(4), torch.zeros(3), [1, -1], -8, 7)
    for shape, block_size in (((2, 3), [2, 2]), ((6,), [2, 2]), ((2, 2), [1, -1]), ((4, 1, 1), [1, -1])):
        with pytest.raises(ValueError, match="do not lie as blocks"):
            forward(torch.zeros(4, 6) if shape != (2, 3) else torch.zeros(6, 4), torch.ones(shape), None, block_size,
                    -8, 7)
    with pytest.raises(TypeError, match="float32"):
        forward(torch.zeros(4, 6), torch.ones(4, dtype=torch.float64), None, [1, -1], -8, 7)
    with pytest.raises(ValueError, match="gradient"):
        backward(torch.zeros(4, 5), torch.zeros(4, 6), torch.ones(4), None, [1, -1], -8, 7, True, False)
