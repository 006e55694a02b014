"""What every backend of ``qtk::add_extremes_`` must do: the checks, the cases, and a loop over elements."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from qtk.numerics.statistics import count_scales
from tests.kernels import conformance
from tests.kernels.backend_matrix import OneBackend, matrix

BOUND = -1e30
BACKENDS = "op", "reference", "triton"
CASES = {name: case for name, case in conformance.SHAPES.items() if 0 not in case[0]}


def empty(scales):
    return torch.full((scales,), torch.inf), torch.full((scales,), -torch.inf), torch.zeros(3, dtype=torch.int64)


def by_loop(tensors, block_size):
    """The ends of each scale and the counts, an element at a time, in float64."""
    owners = conformance.owners(tensors[0].shape, block_size).reshape(-1).tolist()
    low, high = [torch.inf] * (max(owners) + 1), [-torch.inf] * (max(owners) + 1)
    counted = sentinels = 0
    for x in tensors:
        for owner, value in zip(owners, x.double().reshape(-1).tolist(), strict=True):
            if value <= BOUND:
                sentinels += 1
                continue
            counted += 1
            low[owner], high[owner] = min(low[owner], value), max(high[owner], value)
    return [low, high, [counted, sentinels, 0]]


class Conformance(OneBackend):
    """The tests of one backend; a subclass whose name begins with Test says which."""

    add_extremes_: Callable[..., None]

    def after(self, tensors, block_size, least=0):
        state = empty(count_scales(tensors[0].shape, block_size))
        for x in tensors:
            self.add_extremes_(x, block_size, BOUND, least, *state)
        return [tensor.tolist() for tensor in state]

    @matrix(case=CASES, layout=conformance.LAYOUTS, kind=[*conformance.KINDS, torch.float64], backend=BACKENDS)
    def test_the_ends_of_all_tensors(self, case, layout, kind):
        shape, block_size = CASES[case]
        generator = torch.Generator().manual_seed(0)
        tensors = [torch.randn(shape, generator=generator).to(kind) for _ in range(3)]
        for x in tensors[:2]:  # a sentinel in some tensors, as float16 cannot hold -1e30 but has -inf
            x.view(-1)[:: max(1, x.numel() // 5)] = -torch.inf
        found = self.after([conformance.LAYOUTS[layout](x) for x in tensors], block_size)
        low, high, counts = by_loop(tensors, block_size)
        assert counts[1] > 0
        assert found[2] == counts
        assert found[0] == pytest.approx(low, rel=1e-6)
        assert found[1] == pytest.approx(high, rel=1e-6)

    @pytest.mark.parametrize("columns", [1, 5, 64, 1000])
    def test_nan_stays_and_plus_infinity_is_counted_as_broken(self, columns):
        x, after_it = torch.zeros(4, columns), torch.full((4, columns), -3.0)
        x[1, 0], x[2, columns // 2] = torch.inf, torch.nan
        for turned in (False, True):
            tensors = [each.t().contiguous() if turned else each for each in (x, after_it)]
            low, high, counts = self.after(tensors, [-1, 1] if turned else [1, -1])
            assert (low[:2], low[3], high[0], high[1], high[3]) == ([-3.0, -3.0], -3.0, 0.0, torch.inf, 0.0)
            assert low[2] != low[2]
            assert high[2] != high[2]
            assert counts == [8 * columns, 0, 1]  # of two tensors one is broken

    @pytest.mark.parametrize("shape", [(9,), (70, 300), (3, 5000)])
    def test_fewer_sentinels_than_make_a_mask_are_broken(self, shape):
        x = torch.ones(shape)
        x.view(-1)[:3] = BOUND
        for least, broken in ((0, 0), (3, 0), (4, 1)):
            assert self.after([x, torch.ones(shape), x], (), least)[2] == [3 * x.numel() - 6, 6, 2 * broken]
        assert self.after([torch.ones(shape)], (), 4)[2] == [x.numel(), 0, 0]

    def test_a_scale_of_sentinels_alone_has_no_ends(self):
        x = torch.full((2, 40), -torch.inf)
        x[1] = 2.0
        low, high, _ = self.after([x], (1, -1))
        assert (low, high) == ([torch.inf, 2.0], [-torch.inf, 2.0])
