"""What block reconstruction learns of the layers of a window: the rounding of their weights, and their biases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from qtk.algorithms.soft_rounding import SoftRounding
from qtk.algorithms.weight_grid import WeightGrid
from qtk.layerwise.block_hooks import hooked, replacing
from qtk.layerwise.blocks import Window
from qtk.layerwise.path_evaluator import PathEvaluator
from qtk.layerwise.sparsity import zeros_of
from qtk.layerwise.weighted_layers import WeightedLayer
from qtk.numerics.affine import expand


class LearnedBias:
    """A bias that starts where it is; a step moves it relative to its mean magnitude, so a bias of zeros stays.

    Args:
        bias: the bias.

    >>> learned = LearnedBias(torch.tensor([1.0, -3.0]))
    >>> learned.variable.data += 0.1
    >>> learned.value().detach()
    tensor([ 1.2000, -2.8000])
    """

    def __init__(self, bias: Tensor) -> None:
        wide = torch.promote_types(bias.dtype, torch.float32)
        self._start, self._dtype = bias.detach().to(wide, copy=True), bias.dtype
        self._unit = self._start.abs().mean()
        self.variable = torch.zeros_like(self._start).requires_grad_()

    def value(self) -> Tensor:
        """The bias as it is so far."""
        return (self._start + self._unit * self.variable).to(self._dtype)


class WindowVariables:
    """The roundings and biases of a window, which act while they are learned and are written if they are kept.

    Args:
        window: whose weights and biases are learned; they do not change.
        float_weights: float weights of layers that hold results of earlier methods.
        paths: evaluates the graph.
    """

    def __init__(self, window: Window, float_weights: Mapping[WeightedLayer, Tensor], paths: PathEvaluator) -> None:
        self._paths = paths
        self._roundings = {layer.quantizer: _soft_rounding(layer, float_weights.get(layer, layer.weight.detach()))
                           for layer in window.layers}
        self._biases = {bias: LearnedBias(bias) for bias in window.biases}

    @property
    def roundings(self) -> list[Tensor]:
        """The variables of the roundings."""
        return [each.variable for each in self._roundings.values()]

    @property
    def shifts(self) -> list[Tensor]:
        """The variables of the biases."""
        return [each.variable for each in self._biases.values()]

    @contextmanager
    def acting(self) -> Iterator[None]:
        """While the body runs, the quantized path reads the weights and biases as they are learned so far."""
        hooks = {quantizer: replacing(each.weight) for quantizer, each in self._roundings.items()}
        with hooked(hooks), self._paths.replaced({bias: each.value for bias, each in self._biases.items()}):
            yield

    def values(self) -> tuple[list[Tensor], list[Tensor]]:
        """The weights of the window's layers, and its biases."""
        learned = self._roundings, self._biases
        return ([each.weight().detach() for each in learned[0].values()],
                [each.value().detach() for each in learned[1].values()])


def _soft_rounding(layer: WeightedLayer, float_weight: Tensor) -> SoftRounding:
    encoding = layer.quantizer.encoding
    assert encoding is not None
    shape, block_size = layer.weight.shape, encoding.spec.granularity.block_size(layer.weight.ndim)
    scale, zero_point = (None if each is None else expand(each, shape, block_size).expand(shape).contiguous()
                         for each in (encoding.scale, encoding.zero_point))
    assert scale is not None
    grid = WeightGrid(encoding.spec, scale, zero_point)
    zeros, _ = zeros_of(layer.geometry, float_weight, layer.weight.detach())
    weight, present = float_weight.to(torch.float32), layer.weight.detach().to(torch.float32)
    return SoftRounding(weight, grid if zeros is None else grid.pruned(zeros), grid.nearest(present))
