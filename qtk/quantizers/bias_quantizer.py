"""The quantizer of an int32 bias, whose scale follows from the scales of the input and the weight of its op."""

from __future__ import annotations

import torch
from torch import Tensor

from qtk.core.encoding import Encoding
from qtk.core.spec import QuantSpec
from qtk.errors import EncodingError
from qtk.numerics.effective import effective_scale
from qtk.ops.gradient_scale import GradientScale
from qtk.ops.simulate import simulate
from qtk.quantizers.quantizer import Quantizer


class BiasQuantizer(Quantizer):
    """Fake-quantizes a bias with the scale of the products that it is added to: ``input scale · weight scale``.

    Integer kernels add the codes of a bias to sums of products of codes, so no other scale is possible. It is computed
    at every call, has no state, and carries no gradient.

    Args:
        spec: int32, with as many scales as the weight.
        of_input: quantizer of the input of the op, per tensor.
        of_weight: quantizer of its weight, symmetric.
        site: name of the site, for messages.

    >>> from qtk.core.dtypes import INT32, dtype
    >>> from qtk.core.granularity import PerChannel
    >>> x = Quantizer(QuantSpec(dtype("uint8"), symmetric=True), site="input")
    >>> weight = Quantizer(QuantSpec(dtype("int8"), PerChannel(0), symmetric=True), site="fc.weight")
    >>> x.load_encoding(Encoding(x.spec, torch.tensor([0.5])))
    >>> weight.load_encoding(Encoding(weight.spec, torch.tensor([0.5, 0.25])))
    >>> bias = BiasQuantizer(QuantSpec(INT32, PerChannel(0), symmetric=True), x, weight, site="fc.bias")
    >>> bias.encoding.scale
    tensor([0.2500, 0.1250])
    """

    def __init__(self, spec: QuantSpec, of_input: Quantizer, of_weight: Quantizer, *, site: str) -> None:
        super().__init__(spec, site=site)
        self.factors = of_input, of_weight  # in a tuple: they are modules of the graph, not of this one

    @property
    def ready(self) -> bool:
        """Says whether input and weight have encodings."""
        return all(factor.scale is not None for factor in self.factors)

    def encoding_of(self, scale: Tensor | None, zero_point: Tensor | None) -> Encoding | None:
        """The encoding that follows from the encodings of input and weight; ``None`` if one of them has none."""
        return None if scale is None else Encoding(self.spec, scale)

    def range(self) -> tuple[Tensor | None, Tensor | None]:
        """The product of the scales of input and weight, if both have one."""
        return self._product() if self.ready else None, None

    def load_encoding(self, encoding: Encoding) -> None:
        """Raises: EncodingError: the scale is not free to choose."""
        of_input, of_weight = (factor.site for factor in self.factors)
        raise EncodingError(f"the scale of {self.site} is the product of the scales of {of_input} and {of_weight}; "
                            "load encodings for these")

    def learn_range(self, gradient_scale: GradientScale = GradientScale.LSQ) -> None:
        """Does nothing: the scale follows the learned scales."""

    def _simulate_without_scale(self, x: Tensor) -> Tensor:
        return simulate(x, self.spec, self._product())

    def _product(self) -> Tensor:
        with torch.no_grad():
            (of_input, _), (of_weight, _) = (factor.range() for factor in self.factors)
            assert of_input is not None
            assert of_weight is not None
            return effective_scale(of_input) * effective_scale(of_weight)
