"""What every backend of ``qtk::round_with_feedback_`` must do: the checks, the problems, and a loop over numbers.

All sums are exact in float32, so that results are equal; a second problem, of random numbers, is compared in float64.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

GROUPS, ROWS = 2, 37  # more than a strip of the C++ kernel, and no multiple of it
QMIN, QMAX = -8, 7


def problem(columns, *, exact=True, asymmetric=False, kind=torch.float32):
    """Target, change, feedback, scale and zero point."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape):
        if exact:
            return torch.randint(-24, 25, shape, generator=generator) / 8
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    shape = GROUPS, ROWS, columns
    scale = torch.tensor([0.25, 0.5, 1.0])[torch.randint(0, 3, shape, generator=generator)]
    zero = torch.randint(-4, 4, shape, generator=generator).int() if asymmetric else None
    feedback = numbers(GROUPS, columns, columns) / 8
    return numbers(*shape).to(kind), numbers(*shape).to(kind), feedback.to(kind), scale, zero


def one_by_one(target, change, feedback, scale, zero, *, backwards):
    rounded, change = target.double(), change.double()
    columns = range(target.shape[2])
    done = []
    for column in reversed(columns) if backwards else columns:
        for group in range(GROUPS):
            for row in range(ROWS):
                x = target[group, row, column].double()
                for other in done:
                    x += feedback[group, column, other].double() * change[group, row, other]
                offset = 0 if zero is None else int(zero[group, row, column])
                step = scale[group, row, column]
                code = ((x.float() / step).round() + offset).clamp(QMIN, QMAX)
                rounded[group, row, column] = (code - offset) * step
        change[..., column] -= rounded[..., column]
        done.append(column)
    return rounded, change


class Conformance:
    """The tests of one backend; a subclass whose name begins with Test says which."""

    round_with_feedback_: Callable[..., None]

    @pytest.mark.parametrize("backwards", [False, True])
    @pytest.mark.parametrize("asymmetric", [False, True])
    @pytest.mark.parametrize("kind", [torch.float32, torch.float64], ids=str)
    @pytest.mark.parametrize("columns", [1, 9])
    def test_number_by_number(self, columns, kind, asymmetric, backwards):
        for exact in (True, False) if kind == torch.float64 else (True,):
            target, change, *rest = problem(columns, exact=exact, asymmetric=asymmetric, kind=kind)
            expected = one_by_one(target, change, *rest, backwards=backwards)
            self.round_with_feedback_(target, change, *rest, QMIN, QMAX, backwards=backwards)
            for found, other in zip((target, change), expected, strict=True):
                torch.testing.assert_close(found.double(), other, rtol=0, atol=0 if exact else 1e-12)

    @pytest.mark.parametrize("asymmetric", [False, True])
    def test_a_part_of_a_larger_matrix_is_changed_in_place_and_the_rest_is_not(self, asymmetric):
        block = slice(3, 8)
        whole = problem(12, asymmetric=asymmetric)
        kept = [None if each is None else each.clone() for each in whole]
        target, change, feedback, scale, zero = (None if each is None else each[..., block] for each in whole)
        feedback = feedback[:, block]
        expected = one_by_one(target, change, feedback, scale, zero, backwards=False)
        self.round_with_feedback_(target, change, feedback, scale, zero, QMIN, QMAX, backwards=False)
        for found, before, other in zip(whole, kept, expected, strict=False):
            assert torch.equal(found[..., block].double(), other)
            assert torch.equal(found[..., :3], before[..., :3])
            assert torch.equal(found[..., 8:], before[..., 8:])

    def test_scales_that_are_stretched_or_turned(self):
        target, change, feedback, _, _ = problem(9)
        stretched = torch.tensor([0.25, 0.5]).repeat(ROWS)[:ROWS, None].expand(GROUPS, ROWS, 9)
        turned = problem(9)[3].transpose(1, 2).contiguous().transpose(1, 2)
        zeros = torch.arange(9).int().expand(GROUPS, ROWS, 9)
        for scale in (stretched, turned):
            for zero in (None, zeros):
                found = target.clone(), change.clone()
                self.round_with_feedback_(*found, feedback, scale, zero, QMIN, QMAX, backwards=True)
                expected = one_by_one(target, change, feedback, scale, zero, backwards=True)
                assert torch.equal(found[0].double(), expected[0])

    def test_nothing_is_nothing(self):
        for shape in ((0, 3, 4), (2, 0, 4), (2, 3, 0)):
            empty = torch.zeros(shape)
            feedback = torch.zeros(shape[0], shape[2], shape[2])
            self.round_with_feedback_(
                empty, empty.clone(), feedback, empty.clone(), None, QMIN, QMAX, backwards=False
            )

    def test_a_nan_stays_one_and_reaches_what_it_is_fed_to(self):
        target, change, feedback, scale, zero = problem(5)
        target[1, 2, 3] = torch.nan
        self.round_with_feedback_(target, change, feedback, scale, zero, QMIN, QMAX, backwards=False)
        assert target[1, 2].isnan().tolist() == [False, False, False, True, True]
        assert int(target.isnan().sum()) == 2

    def test_results_do_not_depend_on_the_number_of_threads(self):
        generator = torch.Generator().manual_seed(1)
        given = [torch.randn(3, 300, 128, generator=generator) for _ in range(2)]
        feedback, scale = torch.randn(3, 128, 128, generator=generator) / 100, torch.full((3, 300, 128), 0.1)
        results, threads = [], torch.get_num_threads()
        try:
            for count in (1, 4):
                torch.set_num_threads(count)
                target, change = (each.clone() for each in given)
                self.round_with_feedback_(target, change, feedback, scale, None, QMIN, QMAX, backwards=False)
                results.append(target)
        finally:
            torch.set_num_threads(threads)
        assert torch.equal(*results)
