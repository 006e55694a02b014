"""The op as it runs here, its reference, and the Triton kernel: on a GPU, else in Triton's interpreter."""

import pytest
import torch

from qtk.errors import SpecError
from qtk.kernels.backends import load_native
from qtk.numerics import candidate_errors as reference
from qtk.numerics.statistics import count_scales
from qtk.ops import candidate_errors as op
from tests.kernels import conformance

kernels = pytest.importorskip("qtk.kernels.gpu.candidate_errors")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = {name: case for name, case in conformance.SHAPES.items() if 0 not in case[0]}
CANDIDATES = 5
RTOL = 4e-6  # of sums of up to 4096 float32 terms


def in_triton(x, scales, zero_points, block_size, qmin, qmax, *, norm, importance=None, clipped=1.0):
    given = [None if tensor is None else tensor.to(DEVICE) for tensor in (scales, zero_points, importance)]
    found = kernels.candidate_errors(x.to(DEVICE), *given[:2], block_size, qmin, qmax, norm == 2, given[2], clipped)
    return found.cpu()


BACKENDS = {"op": op.candidate_errors, "reference": reference.candidate_errors, "triton": in_triton}


@pytest.fixture(params=BACKENDS)
def errors_of(request):
    return BACKENDS[request.param]


def brute_force(x, scales, zero_points, block_size, qmin, qmax, *, norm, importance=None, clipped=1.0):
    """Element by element: codes in float32, or float64 where x is; the rest in float64."""
    index = conformance.owners(x.shape, block_size).reshape(-1)
    x = (x if x.dtype == torch.float64 else x.float()).reshape(-1)
    result = torch.zeros(scales.shape, dtype=torch.float64)
    for candidate in range(len(scales)):
        step = scales[candidate][index]
        zero = torch.zeros_like(step) if zero_points is None else zero_points[candidate][index].float()
        wanted = (x / step).round() + zero
        code = wanted.clamp(qmin, qmax)
        size = (x.double() - ((code - zero) * step).double()).abs() ** norm
        size = torch.where(wanted == code, size, size * clipped)
        if importance is not None:
            size = size * importance.reshape(-1).double()
        result[candidate].index_add_(0, index, size)
    return result


def problem(case, asymmetric, seed=0):
    shape, block_size = CASES[case]
    generator = torch.Generator().manual_seed(seed)
    scales = torch.rand((CANDIDATES, count_scales(shape, block_size)), generator=generator) * 0.3 + 0.02
    zero_points = torch.randint(-8, 8, scales.shape, generator=generator).int() if asymmetric else None
    return torch.randn(shape, generator=generator), scales, zero_points, block_size


@pytest.mark.pairwise(
    case=CASES, layout=conformance.LAYOUTS, backend=BACKENDS, asymmetric=[False, True], weighted=[False, True],
    norm=[1, 2],
)
def test_every_candidate_of_every_scale(case, layout, backend, asymmetric, weighted, norm):
    x, scales, zero_points, block_size = problem(case, asymmetric)
    importance = torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) if weighted else None
    expected = brute_force(x, scales, zero_points, block_size, -8, 7, norm=norm, importance=importance)
    given = conformance.LAYOUTS[layout](x), scales, zero_points, block_size, -8, 7
    found = BACKENDS[backend](*given, norm=norm, importance=importance)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=RTOL, atol=1e-12)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_widened(errors_of, kind):
    x, scales, zero_points, block_size = problem("channel_first", True)
    expected = brute_force(x.to(kind), scales, zero_points, block_size, -8, 7, norm=2)
    found = errors_of(x.to(kind), scales, zero_points, block_size, -8, 7, norm=2)
    torch.testing.assert_close(found, expected, rtol=RTOL, atol=1e-12)


def test_importance_of_input_channels_is_spread_over_the_rows(errors_of):
    x, scales, _, block_size = problem("channel_first", False)
    importance = torch.rand(1, x.shape[1])
    expected = brute_force(x, scales, None, block_size, -8, 7, norm=2, importance=importance.expand_as(x))
    found = errors_of(x, scales, None, block_size, -8, 7, norm=2, importance=importance)
    torch.testing.assert_close(found, expected, rtol=RTOL, atol=0)


@pytest.mark.parametrize("case", ["tensor_large", "channel_first", "channel_last_wide", "block_rows"])
def test_clipping_may_be_dearer(errors_of, case):
    x, scales, zero_points, block_size = problem(case, True)
    expected = brute_force(x, scales, zero_points, block_size, -8, 7, norm=2, clipped=3.0)
    assert not torch.allclose(expected, brute_force(x, scales, zero_points, block_size, -8, 7, norm=2))
    found = errors_of(x, scales, zero_points, block_size, -8, 7, norm=2, clipped=3.0)
    torch.testing.assert_close(found, expected, rtol=RTOL, atol=1e-12)


@pytest.mark.parametrize("case", ["tensor_large", "channel_first", "channel_last_wide", "block_rows"])
def test_double_precision_stays_double(errors_of, case):
    x, scales, zero_points, block_size = problem(case, True)
    given = (x.double() + 1e-9, scales.double() * (1 + 1e-9), zero_points, block_size, -8, 7)
    importance = torch.rand(x.shape, dtype=torch.float64)
    expected = brute_force(*given, norm=2, importance=importance)
    torch.testing.assert_close(errors_of(*given, norm=2, importance=importance), expected, rtol=1e-13, atol=0)


def test_any_norm():
    x, scales, _, block_size = problem("block_rows", False)
    expected = brute_force(x, scales, None, block_size, -8, 7, norm=2.4)
    torch.testing.assert_close(op.candidate_errors(x, scales, None, block_size, -8, 7, norm=2.4), expected)


def test_long_rows_are_summed_without_losing_digits(errors_of):
    x = torch.full((1, 300_000), 0.3)
    x[0, 0] = 1000.0
    found = errors_of(x, torch.ones(2, 1), None, (), -1000, 1000, norm=1)
    expected = 299_999 * float(torch.tensor(0.3))
    assert found.flatten().tolist() == pytest.approx([expected] * 2, rel=RTOL)


def test_a_nan_spoils_its_scale_alone(errors_of):
    x = torch.tensor([[torch.nan, 1.0], [1.0, 2.0]])
    found = errors_of(x, torch.ones(1, 2), None, (1, -1), -8, 7, norm=2)
    assert found.isnan().tolist() == [[True, False]]


@pytest.mark.skipif(load_native() is not None, reason="the reference adds up as torch does")
def test_sums_do_not_depend_on_the_number_of_threads():
    x, scales, _, block_size = problem("channel_last_wide", False)
    threads = torch.get_num_threads()
    try:
        found = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(op.candidate_errors(x, scales, None, block_size, -8, 7))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("shape", [(3,), (2, 4), (1, 2, 3)])
def test_candidates_that_do_not_fit_are_refused(shape):
    with pytest.raises(SpecError, match=r"are not \[candidates, 3\]"):
        op.candidate_errors(torch.randn(3, 8), torch.ones(shape), None, (1, -1), -8, 7)


@pytest.mark.parametrize("block_size", [(1,), (1, 3), (5, -1)])
def test_blocks_that_do_not_divide_are_refused(block_size):
    with pytest.raises(SpecError, match="do not divide"):
        op.candidate_errors(torch.randn(3, 8), torch.ones(1, 3), None, block_size, -8, 7)
