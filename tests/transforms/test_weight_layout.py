"""The layouts against torch's own layers: a scaled weight gives scaled outputs, or takes scaled inputs."""

import pytest
import torch
from torch import nn

from qtk.operators.op_row import Product
from qtk.transforms.weight_layout import along_inputs, along_outputs, summed_per_output

LAYERS = [
    (nn.Linear(4, 6), Product.OUT_IN, (5, 4)),
    (nn.Conv2d(4, 6, 3), Product.CONV, (2, 4, 5, 5)),
    (nn.Conv1d(4, 6, 2, groups=2), Product.CONV, (2, 4, 5)),
    (nn.Conv2d(4, 8, 3, groups=4), Product.CONV, (2, 4, 5, 5)),
    (nn.ConvTranspose2d(4, 6, 3), Product.CONV_TRANSPOSE, (2, 4, 5, 5)),
    (nn.ConvTranspose2d(4, 6, 3, groups=2), Product.CONV_TRANSPOSE, (2, 4, 5, 5)),
]


def run(layer, weight, x):
    return torch.func.functional_call(layer, {"weight": weight, "bias": torch.zeros(layer.bias.shape).double()}, x)


@pytest.mark.parametrize(("layer", "product", "shape"), LAYERS)
def test_along_outputs_and_inputs(layer, product, shape):
    layer, x = layer.double(), torch.randn(shape).double()
    groups = getattr(layer, "groups", 1)
    channels = -1 if product is Product.OUT_IN else 1
    weight = layer.weight.detach()
    plain = run(layer, weight, x)
    out, into = torch.rand(plain.shape[channels]).double(), torch.rand(x.shape[channels]).double()

    def by_channel(values, like):
        shape = [1] * like.ndim
        shape[channels] = -1
        return values.reshape(shape)

    scaled = run(layer, weight * along_outputs(out, tuple(weight.shape), product, groups), x)
    torch.testing.assert_close(scaled, plain * by_channel(out, plain))
    taken = run(layer, weight * along_inputs(into, tuple(weight.shape), product, groups), x)
    torch.testing.assert_close(taken, run(layer, weight, x * by_channel(into, x)))


@pytest.mark.parametrize(("layer", "product", "shape"), LAYERS)
def test_summed_per_output(layer, product, shape):
    layer = layer.double()
    weight, groups = layer.weight.detach(), getattr(layer, "groups", 1)
    sums = summed_per_output(weight, product, groups)
    ones = torch.ones(shape).double()
    if product is Product.CONV_TRANSPOSE:  # with stride = kernel each output is touched by one kernel element
        layer.stride = layer.kernel_size
        blocks = run(layer, weight, ones)[:, :, :3, :3]
        torch.testing.assert_close(blocks.sum((2, 3))[0], sums)
    else:
        out = run(layer, weight, ones)
        torch.testing.assert_close(out.movedim(-1 if product is Product.OUT_IN else 1, 0).flatten(1)[:, 0], sums)


def test_a_matrix_product_has_its_inputs_first():
    values, weight = torch.rand(4), torch.rand(3, 4)
    assert torch.equal(weight * along_outputs(values, (3, 4), Product.IN_OUT), weight * values)
    assert torch.equal(weight * along_inputs(values[:3], (3, 4), Product.IN_OUT), weight * values[:3, None])
    assert torch.equal(summed_per_output(weight, Product.IN_OUT), weight.sum(0))
