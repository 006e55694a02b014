"""The ops as they run here, their reference, and the Triton kernels by themselves.

The kernels run on a GPU, else in Triton's interpreter.
"""

from types import SimpleNamespace

import pytest
import torch

from qtk.numerics import statistics as reference
from qtk.numerics.statistics import count_scales
from qtk.ops import statistics
from tests.kernels import conformance

kernels = pytest.importorskip("qtk.kernels.gpu.statistics")
# of Triton's interpreter
pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow):RuntimeWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def min_max_in_triton(x, block_size):
    found = kernels.min_max(x.to(DEVICE), block_size, count_scales(x.shape, block_size))
    return tuple(bound.cpu() for bound in found)


def histogram_in_triton(x, first, exponent, bins, block_size):
    return kernels.histogram(x.to(DEVICE), first.to(DEVICE), exponent.to(DEVICE), bins, block_size).cpu()


BACKENDS = {
    "op": statistics,
    "reference": reference,
    "triton": SimpleNamespace(min_max=min_max_in_triton, histogram=histogram_in_triton),
}


@pytest.fixture(params=BACKENDS)
def ops(request):
    return BACKENDS[request.param]


CASES = {name: case for name, case in conformance.SHAPES.items() if 0 not in case[0]}


def per_scale(x, block_size):
    """The elements of each scale, as lists of float64."""
    index = conformance.owners(x.shape, block_size).reshape(-1)
    return [x.double().reshape(-1)[index == scale] for scale in range(int(index.max()) + 1)]


@pytest.mark.pairwise(
    case=CASES, layout=conformance.LAYOUTS, kind=[*conformance.KINDS, torch.float64], backend=BACKENDS
)
def test_min_max_of_every_scale(case, layout, kind, backend):
    shape, block_size = CASES[case]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(kind)
    expected = [(float(own.min()), float(own.max())) for own in per_scale(x, block_size)]
    low, high = BACKENDS[backend].min_max(conformance.LAYOUTS[layout](x), block_size)
    assert (low.dtype, low.shape, high.shape) == (torch.float32, (len(expected),), (len(expected),))
    assert low.tolist() == pytest.approx([pair[0] for pair in expected], rel=1e-6)
    assert high.tolist() == pytest.approx([pair[1] for pair in expected], rel=1e-6)


@pytest.mark.parametrize("columns", [1, 5, 64, 1000])
def test_infinities_count_and_nan_wins(ops, columns):
    x = torch.zeros(4, columns)
    x[0, -1], x[1, 0], x[2, columns // 2] = torch.inf, -torch.inf, torch.nan
    for given, block_size in ((x, [1, -1]), (x.t().contiguous(), [-1, 1])):
        low, high = ops.min_max(given, block_size)
        zero_or = torch.inf if columns == 1 else 0.0
        assert low[[0, 1, 3]].tolist() == [zero_or, -torch.inf, 0.0]
        assert high[[0, 1, 3]].tolist() == [torch.inf, -zero_or, 0.0]
        assert low[2].isnan()
        assert high[2].isnan()


@pytest.mark.parametrize("kind", conformance.KINDS)
def test_extremes_at_every_place_of_rows_of_every_width(kind):
    """On the CPU rows are taken in fours, up to a width, and the last elements of a row may be taken twice."""
    generator = torch.Generator().manual_seed(0)
    for width in (*range(1, 36), 63, 197, 511, 512, 513):
        rows = 2 * width + 3
        x = torch.randn(rows, width, generator=generator).to(kind)
        place = torch.arange(width)
        x[place, place], x[width + place, place], x[-1, width // 2] = 9.0, -9.0, torch.nan
        low, high = statistics.min_max(x, [1, -1])
        expected = torch.aminmax(x.float(), dim=1)
        assert torch.equal(low[:-1], expected.min[:-1])
        assert torch.equal(high[:-1], expected.max[:-1])
        assert low.isnan().nonzero().tolist() == high.isnan().nonzero().tolist() == [[rows - 1]]
        for nan_at in range(width):  # in the first, second, third and last row of four
            broken = torch.zeros(4, width, dtype=kind)
            broken[nan_at % 4, nan_at] = torch.nan
            low, _ = statistics.min_max(broken, [1, -1])
            assert low.isnan().nonzero().tolist() == [[nan_at % 4]]


@pytest.mark.pairwise(
    case=[*CASES, "channel_of_nothing"], layout=conformance.LAYOUTS, kind=conformance.KINDS, bins=[1, 7, 512],
    backend=BACKENDS,
)
def test_every_count_of_a_histogram(case, layout, kind, bins, backend):
    shape, block_size = conformance.SHAPES[case]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(kind)
    scales = max(len(per_scale(x, block_size)), 1) if x.numel() else shape[1]
    generator = torch.Generator().manual_seed(1)
    exponent = torch.randint(-9, -5, (scales,), generator=generator, dtype=torch.int32)
    first = torch.randint(-300, 0, (scales,), generator=generator).float()
    x = torch.where(x.abs() > 1, (x * 64).round() / 64, x)  # many on edges
    found = BACKENDS[backend].histogram(conformance.LAYOUTS[layout](x), first, exponent, bins, block_size)
    assert (found.dtype, found.shape) == (torch.int64, (scales, bins))
    if not x.numel():
        assert not found.any()
        return
    for own, counts, start, power in zip(per_scale(x, block_size), found, first, exponent, strict=True):
        slot = (own / 2.0 ** int(power)).floor() - int(start)  # in float64
        slot = slot[(slot >= 0) & (slot < bins)].long()
        assert counts.tolist() == torch.bincount(slot, minlength=bins).tolist()


def power(of):
    return torch.tensor([of], dtype=torch.int32)


def test_what_lies_outside_is_not_counted(ops):
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.01, 0.0, 0.99, 1.0, 3e38]).repeat(1000)
    assert ops.histogram(x, torch.zeros(1), power(-2), 4, []).tolist() == [[1000, 0, 0, 1000]]


@pytest.mark.parametrize("times", [1, 101])
@pytest.mark.parametrize("exponent", [20, 1, 0, -20])
def test_just_below_zero_is_below_zero_and_both_zeros_are_not(ops, exponent, times):
    x = torch.tensor([-1e-44, -1e-30, -0.0, 0.0, 1e-44, -1e-45]).repeat(times)
    assert ops.histogram(x, torch.tensor([-1.0]), power(exponent), 2, []).tolist() == [[3 * times, 3 * times]]


@pytest.mark.parametrize("bins", [65533, 65534, 65535, 65536])
def test_more_bins_than_fit_16_bits(bins):
    place = torch.randint(-2, bins + 2, (4 * bins + 1,), generator=torch.Generator().manual_seed(0))
    x = torch.where(place < bins, place.float() / 4, torch.nan)
    found = statistics.histogram(x, torch.zeros(1), power(-2), bins, [])
    assert torch.equal(found[0], torch.bincount(place[(place >= 0) & (place < bins)], minlength=bins))


def test_no_number_is_in_the_neighbour_of_its_bin(ops):
    """Next to every edge; differences from the first bin taken before the floor would round some across."""
    edges = torch.arange(-3000, 3000, dtype=torch.float32) / 8
    x = torch.cat([edges, torch.nextafter(edges, torch.tensor(-torch.inf)), torch.nextafter(edges, torch.tensor(9e9))])
    found = ops.histogram(x, torch.tensor([-3001.0]), power(-3), 6001, [])
    assert found[0, 0] == 1
    assert found[0, -1] == 2
    assert (found[0, 1:-1] == 3).all()


@pytest.mark.parametrize(("backend", "threads"), [("op", 1), ("op", 2), ("op", 3), ("reference", 1), ("triton", 1)])
def test_many_elements_on_many_threads(backend, threads):
    ops, before = BACKENDS[backend], torch.get_num_threads()
    x = torch.randn(1_000_003, generator=torch.Generator().manual_seed(0))
    try:
        torch.set_num_threads(threads)
        low, high = ops.min_max(x, [])
        counts = ops.histogram(x, torch.tensor([-256.0]), power(-5), 512, [])
    finally:
        torch.set_num_threads(before)
    assert (float(low), float(high)) == (float(x.min()), float(x.max()))
    assert int(counts.sum()) == x.numel()


def test_opcheck():
    x = torch.randn(6, 8)
    torch.library.opcheck(torch.ops.qtk.min_max.default, (x, [1, -1], 6))
    grid = torch.zeros(6), torch.zeros(6, dtype=torch.int32)
    torch.library.opcheck(torch.ops.qtk.histogram.default, (x, *grid, 5, [1, -1]))
    torch.library.opcheck(torch.ops.qtk.histogram_of_squares.default, (x, x, *grid, 5, [1, -1]))


@pytest.mark.pairwise(
    case=[*CASES, "channel_of_nothing"], layout=conformance.LAYOUTS, kind=conformance.KINDS, bins=[1, 7, 512],
    backend=["op", "reference"],
)
def test_every_sum_of_squares(case, layout, kind, bins, backend):
    shape, block_size = conformance.SHAPES[case]
    generator = torch.Generator().manual_seed(0)
    x, factors = (torch.randn(shape, generator=generator).to(kind) for _ in "ab")
    scales = max(len(per_scale(x, block_size)), 1) if x.numel() else shape[1]
    exponent = torch.randint(-9, -5, (scales,), generator=generator, dtype=torch.int32)
    first = torch.randint(-300, 0, (scales,), generator=generator).float()
    x = torch.where(x.abs() > 1, (x * 64).round() / 64, x)  # many on edges
    given = conformance.LAYOUTS[layout](x), factors, first, exponent
    found = BACKENDS[backend].histogram_of_squares(*given, bins, block_size)
    assert (found.dtype, found.shape) == (torch.float64, (scales, bins))
    if not x.numel():
        assert not found.any()
        return
    pairs = zip(per_scale(x, block_size), per_scale(factors, block_size), strict=True)
    for (own, weight), sums, start, power in zip(pairs, found, first, exponent, strict=True):
        slot = (own / 2.0 ** int(power)).floor() - int(start)  # in float64
        counted = (slot >= 0) & (slot < bins)
        expected = torch.bincount(slot[counted].long(), weight[counted].square(), minlength=bins).double()
        torch.testing.assert_close(sums, expected, rtol=1e-12, atol=1e-300)


@pytest.mark.parametrize("backend", ["op", "reference"])
def test_squares_that_are_not_finite_count_nothing(backend):
    x, factors = torch.zeros(4), torch.tensor([torch.nan, torch.inf, -torch.inf, 2.0])
    sums = BACKENDS[backend].histogram_of_squares(x, factors, torch.zeros(1), torch.zeros(1, dtype=torch.int32), 2, [])
    assert sums.tolist() == [[4.0, 0.0]]


def test_sums_of_squares_do_not_depend_on_which_thread_was_first():
    generator = torch.Generator().manual_seed(0)
    x, factors = (torch.randn(5_000_000, generator=generator) for _ in "ab")
    grid = torch.tensor([-512.0]), torch.tensor([-6], dtype=torch.int32)
    found = [statistics.histogram_of_squares(x, factors, *grid, 1024, []) for _ in range(5)]
    assert all(torch.equal(each, found[0]) for each in found)
    assert float(found[0].sum()) == pytest.approx(float(factors.double().square().sum()), rel=1e-9)
