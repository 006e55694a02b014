"""Against the Gram matrices and means of all rows, in float64."""

import pytest
import torch

from qtk.moments.holdout import Holdout
from qtk.moments.matrix_rows import MatrixRows
from qtk.moments.pooled import pooled, pooled_layer
from qtk.moments.required_statistics import RequiredStatistics
from qtk.moments.second_moments import SecondMoments
from qtk.numerics.im2col import Geometry
from qtk.numerics.matrix_axes import MatrixAxes

STACK = Geometry.of_matrices(MatrixAxes((0,), (1,), (2,)), (3, 5, 4))


def test_matrices_take_the_rows_of_all_weighed_as_their_own():
    torch.manual_seed(0)
    x, owner = torch.randn(10, 4), torch.arange(3).repeat_interleave(torch.tensor([8, 2, 0]))
    moments = SecondMoments(STACK)
    moments.observe_matrices(MatrixRows.of(x, owner, 3))
    found, x = pooled(moments, [1, 2]), x.double()
    expected = torch.stack([x[:8].mT @ x[:8], x.mT @ x * 0.2, x.mT @ x * 0.1])
    torch.testing.assert_close(found.gram[:, 0], expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.mean, torch.stack([x[:8].mean(0), x.mean(0), x.mean(0)]))
    assert found.counts == (8, 2, 1)
    assert found.rows_of_groups.flatten().tolist() == [8, 10, 10]
    assert found.of_matrix(2).rows == 1
    assert pooled(moments, []) is moments
    assert moments.counts == (8, 2, 0)


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_a_layer_takes_the_rows_of_all(rows):
    torch.manual_seed(0)
    x = torch.randn(20, 4)
    total = SecondMoments(Geometry.linear(), RequiredStatistics(holdout=Holdout(0.25)))
    total.observe(x)
    found, own = pooled_layer(rows, total), max(rows, 1)
    kept, held_out = x.double().split([15, 5])
    torch.testing.assert_close(found.gram[0, 0], kept.mT @ kept * own / 15, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.mean[0], kept.mean(0))
    torch.testing.assert_close(found.held_out.mean[0], held_out.mean(0))
    assert found.rows == own
    assert found.rows_of_groups.item() == 15


def test_rows_of_zeros_do_not_count():
    """A dense mixture gives every row to every expert, scaled by 0 where the router did not choose it."""
    torch.manual_seed(0)
    x = torch.randn(9, 4)
    moments = SecondMoments(STACK)
    moments.observe_matrices(MatrixRows.of(torch.cat([x, x, 0 * x]), torch.arange(3).repeat_interleave(9), 3))
    assert moments.counts == (9, 9, 0)
    found, x = pooled(moments, [2]), x.double()
    torch.testing.assert_close(found.gram[2, 0], 2 * x.mT @ x / 18, rtol=1e-5, atol=1e-5)
