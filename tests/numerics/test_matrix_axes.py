import torch

from qtk.numerics.im2col import Geometry, gemm_to_weight, weight_to_gemm
from qtk.numerics.matrix_axes import MatrixAxes


def test_a_weight_comes_back_from_any_order_of_axes():
    weight = torch.randn(2, 3, 5, 7)
    axes = MatrixAxes((1, 3), (0,), (2,))
    matrices = axes.to_gemm(weight)
    assert matrices.shape == (21, 2, 5)
    assert torch.equal(matrices[1 * 7 + 4], weight[:, 1, :, 4])
    assert torch.equal(axes.from_gemm(matrices, weight.shape), weight)
    geometry = Geometry.of_matrices(axes, weight.shape)
    assert geometry.groups == 21
    assert torch.equal(gemm_to_weight(weight_to_gemm(weight, geometry), geometry, weight.shape), weight)


def test_views_of_matrices_are_in_the_order_of_the_indices():
    weight = torch.zeros(2, 4, 3)
    axes = MatrixAxes((0, 2), (1,), ())
    for index, view in enumerate(axes.matrices(weight)):
        view.fill_(index)
    assert torch.equal(weight.long(), axes.indices(weight.shape))


def test_outputs_that_are_cut_are_matrices():
    weight = torch.arange(24.0).reshape(4, 6)
    axes = MatrixAxes((), (1,), (0,), parts=3)
    matrices = axes.to_gemm(weight)
    assert matrices.shape == (3, 2, 4)
    assert torch.equal(matrices[1], weight[:, 2:4].mT)
    assert torch.equal(axes.from_gemm(matrices, weight.shape), weight)
    assert [tuple(view.shape) for view in axes.matrices(weight)] == [(4, 2)] * 3
    for index, view in enumerate(axes.matrices(weight)):
        view.fill_(index)
    assert torch.equal(weight.long(), axes.indices(weight.shape))
    assert (axes.separate, axes.of_one.count((4, 2)), Geometry.of_matrices(axes, (4, 6)).groups) == ((1,), 1, 3)
