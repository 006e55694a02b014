"""The ops as they run here, and the Triton kernels by themselves: on a GPU, else in Triton's interpreter."""

from types import SimpleNamespace

import pytest
import torch

from qtk.numerics.statistics import count_scales
from qtk.ops import statistics
from tests.kernels import conformance

kernels = pytest.importorskip("qtk.kernels.gpu.statistics")
pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value):RuntimeWarning")  # of the interpreter
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def min_max_in_triton(x, block_size):
    found = kernels.min_max(x.to(DEVICE), block_size, count_scales(x.shape, block_size))
    return tuple(bound.cpu() for bound in found)


def histogram_in_triton(x, low, width, bins, block_size):
    return kernels.histogram(x.to(DEVICE), low.to(DEVICE), width.to(DEVICE), bins, block_size).cpu()


BACKENDS = {
    "op": statistics,
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


@pytest.mark.parametrize("kind", [*conformance.KINDS, torch.float64], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_min_max_of_every_scale(ops, case, kind):
    shape, block_size = CASES[case]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(kind)
    expected = [(float(own.min()), float(own.max())) for own in per_scale(x, block_size)]
    for layout in conformance.LAYOUTS.values():
        low, high = ops.min_max(layout(x), block_size)
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


@pytest.mark.parametrize("kind", conformance.KINDS, ids=str)
@pytest.mark.parametrize("bins", [1, 7, 512])
@pytest.mark.parametrize("case", [*CASES, "channel_of_nothing"])
def test_every_count_of_a_histogram(ops, case, bins, kind):
    shape, block_size = conformance.SHAPES[case]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(kind)
    scales = max(len(per_scale(x, block_size)), 1) if x.numel() else shape[1]
    # widths by which float32 divides exactly, and edges that some elements hit
    low, width = torch.full((scales,), -2.0), torch.full((scales,), 4.0 / 512)
    x = torch.where(x.abs() > 1, (x * 64).round() / 64, x)
    found = ops.histogram(x, low, width, bins, block_size)
    assert (found.dtype, found.shape) == (torch.int64, (scales, bins))
    if not x.numel():
        assert not found.any()
        return
    for own, counts in zip(per_scale(x, block_size), found, strict=True):
        place = (own + 2.0) / (4.0 / 512)
        place = place[(place >= 0) & (place <= bins)].floor().clamp(max=bins - 1).long()
        assert counts.tolist() == torch.bincount(place, minlength=bins).tolist()
    for layout in conformance.LAYOUTS.values():
        assert torch.equal(ops.histogram(layout(x), low, width, bins, block_size), found)


def test_what_lies_outside_is_not_counted(ops):
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.01, 0.0, 1.0, 1.01]).repeat(1000)
    assert ops.histogram(x, torch.zeros(1), torch.tensor([0.25]), 4, []).tolist() == [[1000, 0, 0, 1000]]


def test_a_width_of_nothing_counts_nothing_else(ops):
    x = torch.tensor([1.0, 1.0, 2.0])
    assert ops.histogram(x, torch.ones(1), torch.zeros(1), 4, []).sum() == 0  # 0/0 lies nowhere, 1/0 outside


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_many_elements_on_many_threads(ops, threads):
    before = torch.get_num_threads()
    x = torch.randn(1_000_003, generator=torch.Generator().manual_seed(0))
    try:
        torch.set_num_threads(threads)
        low, high = ops.min_max(x, [])
        counts = ops.histogram(x, low, (high - low) / 512, 512, [])
    finally:
        torch.set_num_threads(before)
    assert (float(low), float(high)) == (float(x.min()), float(x.max()))
    assert int(counts.sum()) == x.numel()


def test_opcheck():
    x = torch.randn(6, 8)
    torch.library.opcheck(torch.ops.qtk.min_max.default, (x, [1, -1], 6))
    torch.library.opcheck(torch.ops.qtk.histogram.default, (x, torch.zeros(6), torch.ones(6), 5, [1, -1]))
