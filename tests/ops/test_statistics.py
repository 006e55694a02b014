"""The ops as they run here; their references and their Triton kernels pass the same tests in files of their own."""

import pytest
import torch

from qtk.numerics.statistics import count_scales
from qtk.ops import statistics
from tests.kernels import conformance, statistics_conformance
from tests.kernels.statistics_conformance import power


class TestOp(statistics_conformance.Conformance):
    backend = "op"
    min_max = staticmethod(statistics.min_max)
    histogram = staticmethod(statistics.histogram)

    @pytest.mark.parametrize("threads", [1, 2, 3])
    def test_many_elements_on_many_threads(self, threads):
        super().test_many_elements_on_many_threads(threads)


class TestBoth(statistics_conformance.Conformance):
    """Each half of the results of ``histogram_and_min_max``."""

    backend = "op"

    @staticmethod
    def min_max(x, block_size):
        scales = count_scales(x.shape, block_size)
        grid = torch.zeros(scales), torch.zeros(scales, dtype=torch.int32)
        return statistics.histogram_and_min_max(x, *grid, 1, block_size)[1:]

    @staticmethod
    def histogram(x, first, exponent, bins, block_size):
        if not x.numel():
            pytest.skip("nothing has no extremes")
        return statistics.histogram_and_min_max(x, first, exponent, bins, block_size)[0]

    @pytest.mark.parametrize("threads", [1, 2, 3])
    def test_many_elements_on_many_threads(self, threads):
        super().test_many_elements_on_many_threads(threads)


@pytest.mark.parametrize("kind", conformance.KINDS)
def test_a_pass_that_counts_finds_the_extremes_wherever_they_are(kind):
    grid = torch.zeros(1), torch.zeros(1, dtype=torch.int32)
    for length in (64, 65, 127, 128, 200):
        for place in range(length):
            x = torch.zeros(length, dtype=kind)
            x[place], x[place - 1] = 9.0, -9.0
            counts, low, high = statistics.histogram_and_min_max(x, *grid, 10, [])
            assert (counts.tolist(), float(low), float(high)) == ([[length - 2, *[0] * 8, 1]], -9.0, 9.0)
            x[place] = torch.nan
            counts, low, high = statistics.histogram_and_min_max(x, *grid, 10, [])
            assert (int(counts.sum()), bool(low.isnan()), bool(high.isnan())) == (length - 2, True, True)


class TestSquares(statistics_conformance.SquaresConformance):
    backend = "op"
    histogram_of_squares = staticmethod(statistics.histogram_of_squares)


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


@pytest.mark.parametrize("bins", [65533, 65534, 65535, 65536])
def test_more_bins_than_fit_16_bits(bins):
    place = torch.randint(-2, bins + 2, (4 * bins + 1,), generator=torch.Generator().manual_seed(0))
    x = torch.where(place < bins, place.float() / 4, torch.nan)
    found = statistics.histogram(x, torch.zeros(1), power(-2), bins, [])
    assert torch.equal(found[0], torch.bincount(place[(place >= 0) & (place < bins)], minlength=bins))


def test_opcheck():
    x = torch.randn(6, 8)
    torch.library.opcheck(torch.ops.qtk.min_max.default, (x, [1, -1], 6))
    grid = torch.zeros(6), torch.zeros(6, dtype=torch.int32)
    torch.library.opcheck(torch.ops.qtk.histogram.default, (x, *grid, 5, [1, -1]))
    torch.library.opcheck(torch.ops.qtk.histogram_and_min_max.default, (x, *grid, 5, [1, -1]))
    torch.library.opcheck(torch.ops.qtk.histogram_of_squares.default, (x, x, *grid, 5, [1, -1]))


def test_sums_of_squares_do_not_depend_on_which_thread_was_first():
    generator = torch.Generator().manual_seed(0)
    x, factors = (torch.randn(5_000_000, generator=generator) for _ in "ab")
    grid = torch.tensor([-512.0]), torch.tensor([-6], dtype=torch.int32)
    found = [statistics.histogram_of_squares(x, factors, *grid, 1024, []) for _ in range(5)]
    assert all(torch.equal(each, found[0]) for each in found)
    assert float(found[0].sum()) == pytest.approx(float(factors.double().square().sum()), rel=1e-9)
