"""The op as it runs here, its reference, and the Triton kernel: on a GPU, else in Triton's interpreter.

Number by number. All sums are exact in float32, so that results are equal; a second problem, of random numbers, is
compared in float64.
"""

import pytest
import torch

from qtk.kernels.backends import load_native
from qtk.numerics import feedback_rounding as numerics
from qtk.ops import feedback_rounding as op

kernels = pytest.importorskip("qtk.kernels.gpu.feedback_rounding")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GROUPS, ROWS = 2, 37  # more than a strip of the C++ kernel, and no multiple of it
QMIN, QMAX = -8, 7


def by_reference(target, change, feedback, scale, zero_point, qmin, qmax, *, backwards):
    op._reference(target, change, feedback, scale, zero_point, qmin, qmax, backwards)


def in_triton(target, change, feedback, scale, zero_point, qmin, qmax, *, backwards):
    own = [None if each is None else each.to(DEVICE) for each in (target, change, feedback, scale, zero_point)]
    kernels.round_with_feedback_(*own, qmin, qmax, backwards)
    target.copy_(own[0])
    change.copy_(own[1])


BACKENDS = {"op": op.round_with_feedback_, "reference": by_reference, "triton": in_triton}


@pytest.fixture(params=BACKENDS)
def round_with_feedback_(request):
    return BACKENDS[request.param]


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


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("columns", [1, 9])
def test_number_by_number(round_with_feedback_, columns, kind, asymmetric, backwards):
    for exact in (True, False) if kind == torch.float64 else (True,):
        target, change, *rest = problem(columns, exact=exact, asymmetric=asymmetric, kind=kind)
        expected = one_by_one(target, change, *rest, backwards=backwards)
        round_with_feedback_(target, change, *rest, QMIN, QMAX, backwards=backwards)
        for found, other in zip((target, change), expected, strict=True):
            torch.testing.assert_close(found.double(), other, rtol=0, atol=0 if exact else 1e-12)


@pytest.mark.parametrize("asymmetric", [False, True])
def test_a_part_of_a_larger_matrix_is_changed_in_place_and_the_rest_is_not(round_with_feedback_, asymmetric):
    block = slice(3, 8)
    whole = problem(12, asymmetric=asymmetric)
    kept = [None if each is None else each.clone() for each in whole]
    target, change, feedback, scale, zero = (None if each is None else each[..., block] for each in whole)
    feedback = feedback[:, block]
    expected = one_by_one(target, change, feedback, scale, zero, backwards=False)
    round_with_feedback_(target, change, feedback, scale, zero, QMIN, QMAX, backwards=False)
    for found, before, other in zip(whole, kept, expected, strict=False):
        assert torch.equal(found[..., block].double(), other)
        assert torch.equal(found[..., :3], before[..., :3])
        assert torch.equal(found[..., 8:], before[..., 8:])


def test_scales_that_are_stretched_or_turned(round_with_feedback_):
    target, change, feedback, _, _ = problem(9)
    stretched = torch.tensor([0.25, 0.5]).repeat(ROWS)[:ROWS, None].expand(GROUPS, ROWS, 9)
    turned = problem(9)[3].transpose(1, 2).contiguous().transpose(1, 2)
    zeros = torch.arange(9).int().expand(GROUPS, ROWS, 9)
    for scale in (stretched, turned):
        for zero in (None, zeros):
            found = target.clone(), change.clone()
            round_with_feedback_(*found, feedback, scale, zero, QMIN, QMAX, backwards=True)
            expected = one_by_one(target, change, feedback, scale, zero, backwards=True)
            assert torch.equal(found[0].double(), expected[0])


def test_nothing_is_nothing(round_with_feedback_):
    for shape in ((0, 3, 4), (2, 0, 4), (2, 3, 0)):
        empty = torch.zeros(shape)
        feedback = torch.zeros(shape[0], shape[2], shape[2])
        round_with_feedback_(empty, empty.clone(), feedback, empty.clone(), None, QMIN, QMAX, backwards=False)


def test_a_nan_stays_one_and_reaches_what_it_is_fed_to(round_with_feedback_):
    target, change, feedback, scale, zero = problem(5)
    target[1, 2, 3] = torch.nan
    round_with_feedback_(target, change, feedback, scale, zero, QMIN, QMAX, backwards=False)
    assert target[1, 2].isnan().tolist() == [False, False, False, True, True]
    assert int(target.isnan().sum()) == 2


def test_any_function_that_rounds():
    target = torch.tensor([[[0.3, 0.3, 0.3]]])
    change, feedback = target.clone(), torch.ones(1, 3, 3)
    numerics.round_with_feedback_(
        target, change, feedback, lambda x, column: x.round() + 10 * column, backwards=False
    )
    assert target.flatten().tolist() == [0, 11, 10]  # 0.3, 0.3 + 0.3, 0.3 + 0.3 - 10.7
    torch.testing.assert_close(change.flatten(), torch.tensor([0.3, -10.7, -9.7]))


@pytest.mark.skipif(load_native() is not None, reason=f"C++ kernels: {load_native()}")
def test_what_does_not_fit_is_refused():
    target, change, feedback, scale, _ = problem(5)
    for wrong in (
        (target, change[..., :4], feedback, scale), (target, change, feedback[:, :4], scale),
        (target, change, feedback, scale[:1]), (target.mT.contiguous().mT, change, feedback, scale),
    ):
        with pytest.raises(ValueError, match=r"shape|gaps"):
            op.round_with_feedback_(*wrong, None, QMIN, QMAX, backwards=False)


def test_results_do_not_depend_on_the_number_of_threads(round_with_feedback_):
    generator = torch.Generator().manual_seed(1)
    given = [torch.randn(3, 300, 128, generator=generator) for _ in range(2)]
    feedback, scale = torch.randn(3, 128, 128, generator=generator) / 100, torch.full((3, 300, 128), 0.1)
    results, threads = [], torch.get_num_threads()
    try:
        for count in (1, 4):
            torch.set_num_threads(count)
            target, change = (each.clone() for each in given)
            round_with_feedback_(target, change, feedback, scale, None, QMIN, QMAX, backwards=False)
            results.append(target)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*results)


def test_what_pytorch_asks_of_an_op():
    target, change, feedback, scale, zero = problem(5, asymmetric=True)
    given = target, change, feedback, scale, zero, QMIN, QMAX, False
    torch.library.opcheck(torch.ops.qtk.round_with_feedback_.default, given)
