import warnings

import pytest
import torch

from qtk.layerwise.starved_matrices import StarvedMatrices
from qtk.moments.matrix_rows import MatrixRows
from qtk.moments.second_moments import SecondMoments
from qtk.numerics.im2col import Geometry
from qtk.numerics.matrix_axes import MatrixAxes

GEOMETRY = Geometry.of_matrices(MatrixAxes((0,), (1,), (2,)), (3, 5, 4))


def moments_of(counts):
    torch.manual_seed(0)
    x, owner = torch.randn(sum(counts), 4), torch.arange(3).repeat_interleave(torch.tensor(counts))
    moments = SecondMoments(GEOMETRY)
    moments.observe_matrices(MatrixRows.of(x, owner, 3))
    return x.double(), moments


def test_they_have_the_gram_matrix_of_all_rows_weighed_as_their_own():
    x, moments = moments_of([8, 2, 0])
    starved = StarvedMatrices()
    gram = starved.pooled("experts", moments).gram[:, 0]
    torch.testing.assert_close(gram[0], x[:8].mT @ x[:8])
    torch.testing.assert_close(gram[1], x.mT @ x * (2 / 10))
    torch.testing.assert_close(gram[2], x.mT @ x * (1 / 10))
    with pytest.warns(match=r"in 1 weights .*experts: 2 of 3 \(1 met 2 rows, 2 met 0 rows\)"):
        starved.warn()


def test_enough_rows_are_left_alone():
    _, moments = moments_of([8, 4, 5])
    starved = StarvedMatrices()
    assert starved.pooled("experts", moments) is moments
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        starved.warn()
