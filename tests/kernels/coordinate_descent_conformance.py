"""What every backend of ``qtk::descend_`` must do: the checks, the problems, and a descent weight by weight.

All sums are exact in float32, so that results are equal. A second problem of random numbers is compared in float64.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

GROUPS, OUTPUTS = 2, 5
QMIN, QMAX = -8, 7


def problem(columns, *, exact=True, asymmetric=False, kind=torch.float32):
    """Rounded, change, half gradient, Gram matrix, step, scale and zero point."""
    generator = torch.Generator().manual_seed(0)

    def integers(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator)

    shape = GROUPS, OUTPUTS, columns
    scale = torch.tensor([0.25, 0.5, 1.0])[integers(0, 3, *shape)]
    zero = integers(-3, 3, *shape).int() if asymmetric else None
    if exact:
        gram = integers(-1, 2, GROUPS, columns, columns).double()
        gram += gram.mT.clone()
        gram.diagonal(dim1=1, dim2=2).copy_(torch.tensor([8.0, 16.0])[integers(0, 2, GROUPS, columns)])
        weight = integers(-40, 40, *shape).double() / 16
    else:
        x = torch.randn(GROUPS, 3 * columns, columns, generator=generator, dtype=torch.float64)
        gram, weight = x.mT @ x, torch.randn(shape, generator=generator, dtype=torch.float64)
    offset = 0 if zero is None else zero
    rounded = ((weight / scale).round().clamp(-4, 4) + integers(-1, 2, *shape) - offset).clamp(QMIN, QMAX) + offset
    rounded = (rounded * scale).double()
    change = weight - rounded
    step = 1 / gram.diagonal(dim1=1, dim2=2)
    given = (rounded, change, change @ gram, gram, step)
    return *(each.to(kind).contiguous() for each in given), scale, zero


def weight_by_weight(rounded, change, half_gradient, gram, step, scale, zero):
    rounded, change, half_gradient = (each.double().clone() for each in (rounded, change, half_gradient))
    for group in range(GROUPS):
        for output in range(OUTPUTS):
            for column in range(rounded.shape[2]):
                at = group, output, column
                x = rounded[at] + half_gradient[at] * step[group, column].double()
                offset = 0 if zero is None else int(zero[at])
                best = (((x.float() / scale[at]).round() + offset).clamp(QMIN, QMAX) - offset) * scale[at]
                move = rounded[at] - best
                rounded[at] = best
                change[at] += move
                half_gradient[group, output] += move * gram[group, column].double()
    return rounded, change, half_gradient


class Conformance:
    """The tests of one backend; a subclass whose name begins with Test says which."""

    descend_: Callable[..., None]

    @pytest.mark.parametrize("asymmetric", [False, True])
    @pytest.mark.parametrize("kind", [torch.float32, torch.float64], ids=str)
    @pytest.mark.parametrize("columns", [1, 16, 45])  # the C++ kernel looks at 16 weights at a time
    def test_weight_by_weight(self, columns, kind, asymmetric):
        for exact in (True, False) if kind == torch.float64 else (True,):
            given = problem(columns, exact=exact, asymmetric=asymmetric, kind=kind)
            before, expected = given[0].clone(), weight_by_weight(*given)
            self.descend_(*given, QMIN, QMAX)
            for found, other in zip(given, expected, strict=False):
                torch.testing.assert_close(found.double(), other, rtol=0, atol=0 if exact else 1e-9)
            if columns > 1:
                assert bool((given[0] != before).any())
                assert bool((given[0] == before).any())

    def test_weights_at_their_best_stay(self):
        given = problem(45)
        for _ in range(50):
            self.descend_(*given, QMIN, QMAX)
        settled = [each.clone() for each in given[:3]]
        self.descend_(*given, QMIN, QMAX)
        for found, other in zip(given, settled, strict=False):
            assert torch.equal(found, other)

    def test_a_column_without_a_step_stays(self):
        given = problem(16)
        given[4][:, 3] = 0
        before = given[0].clone()
        self.descend_(*given, QMIN, QMAX)
        assert torch.equal(given[0][..., 3], before[..., 3])
        assert not torch.equal(given[0], before)

    def test_scales_that_are_stretched(self):
        given = problem(16)
        scale = torch.tensor([0.25, 0.5, 1.0, 0.25, 0.5])[:, None].expand(GROUPS, OUTPUTS, 16)
        zero = torch.arange(-8, 8).int().expand(GROUPS, OUTPUTS, 16)
        expected = weight_by_weight(*given[:5], scale, zero)
        self.descend_(*given[:5], scale, zero, QMIN, QMAX)
        assert torch.equal(given[0].double(), expected[0])

    def test_nothing_is_nothing(self):
        for shape in ((0, 3, 4), (2, 0, 4), (2, 3, 0)):
            empty = torch.zeros(shape)
            gram, step = torch.zeros(shape[0], shape[2], shape[2]), torch.zeros(shape[0], shape[2])
            self.descend_(empty, empty.clone(), empty.clone(), gram, step, empty.clone(), None, QMIN, QMAX)
