"""Which output channel and which input channel each element of a weight belongs to."""

from __future__ import annotations

from torch import Tensor

from qtk.nn.kept_batch_norm import along_channels
from qtk.operators.op_row import Product


def along_outputs(values: Tensor, shape: tuple[int, ...], product: Product, groups: int = 1) -> Tensor:
    """One value per output channel, laid out so that it broadcasts to a weight.

    Shape: ``values`` [out]; result broadcastable to ``shape``, the shape of the weight.

    >>> import torch
    >>> along_outputs(torch.arange(4), (6, 2, 3), Product.CONV_TRANSPOSE, groups=2).squeeze(-1).tolist()
    [[0, 1], [0, 1], [0, 1], [2, 3], [2, 3], [2, 3]]
    """
    return along_channels(values, shape, output_axis(product), groups if product is Product.CONV_TRANSPOSE else 1)


def output_axis(product: Product) -> int:
    """The axis of a weight that its output channels are at; a transposed convolution has groups of them."""
    return 0 if product in (Product.OUT_IN, Product.CONV) else 1


def along_inputs(values: Tensor, shape: tuple[int, ...], product: Product, groups: int = 1) -> Tensor:
    """One value per input channel, laid out so that it broadcasts to a weight.

    Shape: ``values`` [in]; result broadcastable to ``shape``, the shape of the weight.

    >>> import torch
    >>> along_inputs(torch.arange(4), (2, 2, 3), Product.CONV, groups=2).squeeze(-1).tolist()
    [[0, 1], [2, 3]]
    """
    kernel = (1,) * (len(shape) - 2)
    if product is Product.OUT_IN:
        return values.reshape(1, -1)
    if product is Product.CONV:
        per_group = values.reshape(groups, 1, shape[1])
        return per_group.expand(groups, shape[0] // groups, shape[1]).reshape(*shape[:2], *kernel)
    return values.reshape(-1, 1, *kernel)


def summed_per_output(products: Tensor, product: Product, groups: int = 1) -> Tensor:
    """The sums of a weight's elements per output channel.

    Shape: ``products`` as the weight; result [out].
    """
    if product is Product.IN_OUT:
        return products.sum(0)
    if product is Product.CONV_TRANSPOSE:
        inputs, outputs = products.shape[:2]
        return products.reshape(groups, inputs // groups, outputs, -1).sum((1, 3)).flatten()
    return products.flatten(1).sum(1)
