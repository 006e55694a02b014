"""The op as it runs here; its reference and its Triton kernel pass the same tests in files of their own."""

import pytest
import torch

from qtk.errors import SpecError
from qtk.kernels.backends import load_native
from qtk.ops import candidate_errors as op
from tests.kernels import candidate_error_conformance
from tests.kernels.candidate_error_conformance import brute_force, problem


class TestOp(candidate_error_conformance.Conformance):
    backend = "op"
    errors_of = staticmethod(op.candidate_errors)


def test_any_norm():
    x, scales, _, block_size = problem("block_rows", False)
    expected = brute_force(x, scales, None, block_size, -8, 7, norm=2.4)
    torch.testing.assert_close(op.candidate_errors(x, scales, None, block_size, -8, 7, norm=2.4), expected)


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
