"""Against torch's convolutions."""

import itertools

import pytest
import torch
from torch.nn import functional

from qtk.numerics.im2col import Geometry, gemm_to_weight, im2col, weight_to_gemm

CONV = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
TRANSPOSED = {1: functional.conv_transpose1d, 2: functional.conv_transpose2d, 3: functional.conv_transpose3d}
KERNELS, SIZES = (3, 2, 4), (9, 8, 7)


def product(x, weight, geometry, samples, out):
    """[N, out, *space] by the matrix product."""
    rows = im2col(x, geometry)
    found = rows @ weight_to_gemm(weight, geometry).mT  # [groups, rows, out / groups]
    groups, _, width = found.shape
    return found.reshape(groups, samples, -1, width).permute(1, 0, 3, 2).reshape(samples, groups * width, *out)


@pytest.mark.medium
@pytest.mark.parametrize(("groups", "outputs"), [(1, 4), (2, 6), (6, 6), (6, 12)])
@pytest.mark.parametrize(("stride", "padding", "dilation"), list(itertools.product((1, 2), (0, 1), (1, 2))))
@pytest.mark.parametrize("space", [1, 2, 3])
def test_convolutions(space, stride, padding, dilation, groups, outputs):
    kernel = KERNELS[:space]
    x = torch.randn(2, 6, *(size + 4 for size in SIZES[:space]), dtype=torch.float64)
    weight = torch.randn(outputs, 6 // groups, *kernel, dtype=torch.float64)
    expected = CONV[space](x, weight, stride=stride, padding=padding, dilation=dilation, groups=groups)
    geometry = Geometry(kernel, (stride,) * space, (padding,) * space, (dilation,) * space, groups)
    found = product(x, weight, geometry, 2, expected.shape[2:])
    torch.testing.assert_close(found, expected)
    assert torch.equal(gemm_to_weight(weight_to_gemm(weight, geometry), geometry, weight.shape), weight)


@pytest.mark.medium
@pytest.mark.sample(78)
@pytest.mark.parametrize(("groups", "outputs"), [(1, 4), (2, 6), (6, 6)])
@pytest.mark.parametrize(("stride", "padding", "dilation"), list(itertools.product((1, 2, 3), (0, 1), (1, 2))))
@pytest.mark.parametrize("space", [1, 2, 3])
def test_transposed_convolutions(space, stride, padding, dilation, groups, outputs):
    kernel = KERNELS[:space]
    x = torch.randn(2, 6, *SIZES[:space], dtype=torch.float64)
    weight = torch.randn(6, outputs // groups, *kernel, dtype=torch.float64)
    extra = min(stride, dilation + 1) - 1
    settings = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "output_padding": extra}
    expected = TRANSPOSED[space](x, weight, **settings)
    geometry = Geometry(
        kernel, (stride,) * space, (padding,) * space, (dilation,) * space, groups, True, (extra,) * space
    )
    found = product(x, weight, geometry, 2, expected.shape[2:])
    torch.testing.assert_close(found, expected)
    assert torch.equal(gemm_to_weight(weight_to_gemm(weight, geometry), geometry, weight.shape), weight)


def test_padding_wider_than_a_transposed_kernel_crops():
    x, weight = torch.randn(1, 1, 8, dtype=torch.float64), torch.randn(1, 1, 2, dtype=torch.float64)
    expected = functional.conv_transpose1d(x, weight, padding=3)
    geometry = Geometry((2,), (1,), (3,), (1,), 1, True)
    torch.testing.assert_close(product(x, weight, geometry, 1, expected.shape[2:]), expected)


def test_a_linear_layer_is_its_own_matrix():
    x, weight = torch.randn(2, 5, 7, dtype=torch.float64), torch.randn(3, 7, dtype=torch.float64)
    geometry = Geometry.linear()
    found = (im2col(x, geometry) @ weight_to_gemm(weight, geometry).mT)[0].reshape(2, 5, 3)
    torch.testing.assert_close(found, functional.linear(x, weight))
