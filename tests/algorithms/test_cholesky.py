"""Cholesky factors by panels, against LAPACK's in float64, and matrices that have none."""

import pytest
import torch

from qtk.algorithms.cholesky import PANEL, cholesky

COLUMNS = (1, PANEL, PANEL + 1, 2 * PANEL, 2 * PANEL + 57)


def positive(columns, groups=2, dtype=torch.float64):
    x = torch.randn(groups, 2 * columns, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(columns))
    return (x.mT @ x).to(dtype)


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-4)])
def test_factors_are_those_of_lapack(columns, dtype, tolerance):
    matrix = positive(columns, dtype=dtype)
    factor, failed = cholesky(matrix.tril())  # the upper triangle is not read
    assert not failed.any()
    expected = torch.linalg.cholesky(matrix.to(torch.float64))
    torch.testing.assert_close(factor.to(torch.float64), expected, rtol=tolerance, atol=tolerance * columns**0.5)
    assert torch.equal(factor, factor.tril())


def test_a_large_factor_takes_the_place_of_its_matrix():
    matrix = positive(PANEL + 1)
    assert cholesky(matrix)[0].data_ptr() == matrix.data_ptr()


@pytest.mark.medium
@pytest.mark.parametrize("at", [0, PANEL - 1, PANEL, 2 * PANEL + 56])
def test_a_group_without_a_factor_fails_and_no_other(at):
    matrix = positive(2 * PANEL + 57)
    matrix[1, at, at] = -1.0
    expected = torch.linalg.cholesky(matrix[0])
    factor, failed = cholesky(matrix)
    assert failed.tolist() == [False, True]
    torch.testing.assert_close(factor[0], expected)
