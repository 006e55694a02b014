"""What every backend of ``qtk::candidate_errors`` must do: the checks, the cases, and a brute force."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from qtk.numerics.statistics import count_scales
from tests.kernels import conformance
from tests.kernels.backend_matrix import OneBackend, matrix

CASES = {name: case for name, case in conformance.SHAPES.items() if 0 not in case[0]}
BACKENDS = "op", "reference", "triton"
CANDIDATES = 5
RTOL = 4e-6  # of sums of up to 4096 float32 terms


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


class Conformance(OneBackend):
    """The tests of one backend; a subclass whose name begins with Test says which."""

    errors_of: Callable[..., Tensor]

    @matrix(
        case=CASES, layout=conformance.LAYOUTS, backend=BACKENDS, asymmetric=[False, True], weighted=[False, True],
        norm=[1, 2],
    )
    def test_every_candidate_of_every_scale(self, case, layout, asymmetric, weighted, norm):
        x, scales, zero_points, block_size = problem(case, asymmetric)
        importance = torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) if weighted else None
        expected = brute_force(x, scales, zero_points, block_size, -8, 7, norm=norm, importance=importance)
        given = conformance.LAYOUTS[layout](x), scales, zero_points, block_size, -8, 7
        found = self.errors_of(*given, norm=norm, importance=importance)
        assert found.dtype == torch.float64
        torch.testing.assert_close(found, expected, rtol=RTOL, atol=1e-12)

    @pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=str)
    def test_half_precision_is_widened(self, kind):
        x, scales, zero_points, block_size = problem("channel_first", True)
        expected = brute_force(x.to(kind), scales, zero_points, block_size, -8, 7, norm=2)
        found = self.errors_of(x.to(kind), scales, zero_points, block_size, -8, 7, norm=2)
        torch.testing.assert_close(found, expected, rtol=RTOL, atol=1e-12)

    def test_importance_of_input_channels_is_spread_over_the_rows(self):
        x, scales, _, block_size = problem("channel_first", False)
        importance = torch.rand(1, x.shape[1])
        expected = brute_force(x, scales, None, block_size, -8, 7, norm=2, importance=importance.expand_as(x))
        found = self.errors_of(x, scales, None, block_size, -8, 7, norm=2, importance=importance)
        torch.testing.assert_close(found, expected, rtol=RTOL, atol=0)

    @pytest.mark.parametrize("case", ["tensor_large", "channel_first", "channel_last_wide", "block_rows"])
    def test_clipping_may_be_dearer(self, case):
        x, scales, zero_points, block_size = problem(case, True)
        expected = brute_force(x, scales, zero_points, block_size, -8, 7, norm=2, clipped=3.0)
        assert not torch.allclose(expected, brute_force(x, scales, zero_points, block_size, -8, 7, norm=2))
        found = self.errors_of(x, scales, zero_points, block_size, -8, 7, norm=2, clipped=3.0)
        torch.testing.assert_close(found, expected, rtol=RTOL, atol=1e-12)

    @pytest.mark.parametrize("case", ["tensor_large", "channel_first", "channel_last_wide", "block_rows"])
    def test_double_precision_stays_double(self, case):
        x, scales, zero_points, block_size = problem(case, True)
        given = (x.double() + 1e-9, scales.double() * (1 + 1e-9), zero_points, block_size, -8, 7)
        importance = torch.rand(x.shape, dtype=torch.float64)
        expected = brute_force(*given, norm=2, importance=importance)
        found = self.errors_of(*given, norm=2, importance=importance)
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)

    def test_long_rows_are_summed_without_losing_digits(self):
        x = torch.full((1, 300_000), 0.3)
        x[0, 0] = 1000.0
        found = self.errors_of(x, torch.ones(2, 1), None, (), -1000, 1000, norm=1)
        expected = 299_999 * float(torch.tensor(0.3))
        assert found.flatten().tolist() == pytest.approx([expected] * 2, rel=RTOL)

    def test_a_nan_spoils_its_scale_alone(self):
        x = torch.tensor([[torch.nan, 1.0], [1.0, 2.0]])
        found = self.errors_of(x, torch.ones(1, 2), None, (1, -1), -8, 7, norm=2)
        assert found.isnan().tolist() == [[True, False]]
