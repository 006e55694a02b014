"""What every backend of ``qtk::min_max`` and ``qtk::histogram`` must do: the checks and the cases, in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.kernels import conformance
from tests.kernels.backend_matrix import OneBackend, matrix

BACKENDS = "op", "reference", "triton"
CASES = {name: case for name, case in conformance.SHAPES.items() if 0 not in case[0]}
CASES_AND_NOTHING = [*CASES, "channel_of_nothing"]


def per_scale(x, block_size):
    """The elements of each scale, as lists of float64."""
    index = conformance.owners(x.shape, block_size).reshape(-1)
    return [x.double().reshape(-1)[index == scale] for scale in range(int(index.max()) + 1)]


def power(of):
    return torch.tensor([of], dtype=torch.int32)


class Conformance(OneBackend):
    """The tests of one backend; a subclass whose name begins with Test says which."""

    min_max: Callable[..., tuple[Tensor, Tensor]]
    histogram: Callable[..., Tensor]

    @matrix(case=CASES, layout=conformance.LAYOUTS, kind=[*conformance.KINDS, torch.float64], backend=BACKENDS)
    def test_min_max_of_every_scale(self, case, layout, kind):
        shape, block_size = CASES[case]
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(kind)
        expected = [(float(own.min()), float(own.max())) for own in per_scale(x, block_size)]
        low, high = self.min_max(conformance.LAYOUTS[layout](x), block_size)
        assert (low.dtype, low.shape, high.shape) == (torch.float32, (len(expected),), (len(expected),))
        assert low.tolist() == pytest.approx([pair[0] for pair in expected], rel=1e-6)
        assert high.tolist() == pytest.approx([pair[1] for pair in expected], rel=1e-6)

    @pytest.mark.parametrize("columns", [1, 5, 64, 1000])
    def test_infinities_count_and_nan_wins(self, columns):
        x = torch.zeros(4, columns)
        x[0, -1], x[1, 0], x[2, columns // 2] = torch.inf, -torch.inf, torch.nan
        for given, block_size in ((x, [1, -1]), (x.t().contiguous(), [-1, 1])):
            low, high = self.min_max(given, block_size)
            zero_or = torch.inf if columns == 1 else 0.0
            assert low[[0, 1, 3]].tolist() == [zero_or, -torch.inf, 0.0]
            assert high[[0, 1, 3]].tolist() == [torch.inf, -zero_or, 0.0]
            assert low[2].isnan()
            assert high[2].isnan()

    @matrix(
        case=CASES_AND_NOTHING, layout=conformance.LAYOUTS, kind=conformance.KINDS, bins=[1, 7, 512], backend=BACKENDS,
    )
    def test_every_count_of_a_histogram(self, case, layout, kind, bins):
        shape, block_size = conformance.SHAPES[case]
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(kind)
        scales = max(len(per_scale(x, block_size)), 1) if x.numel() else shape[1]
        generator = torch.Generator().manual_seed(1)
        exponent = torch.randint(-9, -5, (scales,), generator=generator, dtype=torch.int32)
        first = torch.randint(-300, 0, (scales,), generator=generator).float()
        x = torch.where(x.abs() > 1, (x * 64).round() / 64, x)  # many on edges
        found = self.histogram(conformance.LAYOUTS[layout](x), first, exponent, bins, block_size)
        assert (found.dtype, found.shape) == (torch.int64, (scales, bins))
        if not x.numel():
            assert not found.any()
            return
        for own, counts, start, power in zip(per_scale(x, block_size), found, first, exponent, strict=True):
            slot = (own / 2.0 ** int(power)).floor() - int(start)  # in float64
            slot = slot[(slot >= 0) & (slot < bins)].long()
            assert counts.tolist() == torch.bincount(slot, minlength=bins).tolist()

    def test_what_lies_outside_is_not_counted(self):
        x = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.01, 0.0, 0.99, 1.0, 3e38]).repeat(1000)
        assert self.histogram(x, torch.zeros(1), power(-2), 4, []).tolist() == [[1000, 0, 0, 1000]]

    @pytest.mark.parametrize("times", [1, 101])
    @pytest.mark.parametrize("exponent", [20, 1, 0, -20])
    def test_just_below_zero_is_below_zero_and_both_zeros_are_not(self, exponent, times):
        x = torch.tensor([-1e-44, -1e-30, -0.0, 0.0, 1e-44, -1e-45]).repeat(times)
        found = self.histogram(x, torch.tensor([-1.0]), power(exponent), 2, [])
        assert found.tolist() == [[3 * times, 3 * times]]

    def test_no_number_is_in_the_neighbour_of_its_bin(self):
        """Next to every edge; differences from the first bin taken before the floor would round some across."""
        edges = torch.arange(-3000, 3000, dtype=torch.float32) / 8
        below, above = (torch.nextafter(edges, torch.tensor(end)) for end in (-torch.inf, 9e9))
        found = self.histogram(torch.cat([edges, below, above]), torch.tensor([-3001.0]), power(-3), 6001, [])
        assert found[0, 0] == 1
        assert found[0, -1] == 2
        assert (found[0, 1:-1] == 3).all()

    @pytest.mark.parametrize("threads", [1])
    def test_many_elements_on_many_threads(self, threads):
        before = torch.get_num_threads()
        x = torch.randn(1_000_003, generator=torch.Generator().manual_seed(0))
        try:
            torch.set_num_threads(threads)
            low, high = self.min_max(x, [])
            counts = self.histogram(x, torch.tensor([-256.0]), power(-5), 512, [])
        finally:
            torch.set_num_threads(before)
        assert (float(low), float(high)) == (float(x.min()), float(x.max()))
        assert int(counts.sum()) == x.numel()


class SquaresConformance(OneBackend):
    """The tests of one backend of ``qtk::histogram_of_squares``."""

    histogram_of_squares: Callable[..., Tensor]

    @matrix(
        case=CASES_AND_NOTHING, layout=conformance.LAYOUTS, kind=conformance.KINDS, bins=[1, 7, 512],
        backend=["op", "reference"],
    )
    def test_every_sum_of_squares(self, case, layout, kind, bins):
        shape, block_size = conformance.SHAPES[case]
        generator = torch.Generator().manual_seed(0)
        x, factors = (torch.randn(shape, generator=generator).to(kind) for _ in "ab")
        scales = max(len(per_scale(x, block_size)), 1) if x.numel() else shape[1]
        exponent = torch.randint(-9, -5, (scales,), generator=generator, dtype=torch.int32)
        first = torch.randint(-300, 0, (scales,), generator=generator).float()
        x = torch.where(x.abs() > 1, (x * 64).round() / 64, x)  # many on edges
        given = conformance.LAYOUTS[layout](x), factors, first, exponent
        found = self.histogram_of_squares(*given, bins, block_size)
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

    def test_squares_that_are_not_finite_count_nothing(self):
        x, factors = torch.zeros(4), torch.tensor([torch.nan, torch.inf, -torch.inf, 2.0])
        sums = self.histogram_of_squares(x, factors, torch.zeros(1), torch.zeros(1, dtype=torch.int32), 2, [])
        assert sums.tolist() == [[4.0, 0.0]]
