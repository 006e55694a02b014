"""The memory that the parameters of a model take, in float and as its quantizers store them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from qtk.graph.coverage import quantized_parameters
from qtk.graph.flow import Flow
from qtk.graph.graphs import graphs
from qtk.graph.insert import QUANTIZERS, quantizer_nodes
from qtk.quantizers.bias_quantizer import BiasQuantizer
from qtk.quantizers.quantizer import Quantizer

SCALE_BYTES, ZERO_POINT_BYTES = 4, 1


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of all parameters.

    Args:
        float_bytes: as they are.
        codes_bytes: of the codes of the quantized parameters.
        scales_bytes: of their scales and zero points; scales that are stored in few bits count as one byte.
        left_bytes: of the parameters that stay in float.
    """

    float_bytes: int
    codes_bytes: int
    scales_bytes: int
    left_bytes: int

    @property
    def quantized_bytes(self) -> int:
        """All together, quantized."""
        return self.codes_bytes + self.scales_bytes + self.left_bytes

    def __str__(self) -> str:
        parts = (self.float_bytes, self.quantized_bytes, self.codes_bytes, self.scales_bytes, self.left_bytes)
        whole, quantized, codes, scales, left = (f"{size / 1e6:,.2f} MB" for size in parts)
        return f"parameters: {whole}, quantized {quantized} ({codes} of codes, {scales} of scales, {left} in float)"


def footprint(model: nn.Module) -> Footprint:
    """The footprint of a prepared model with its quantizers; a meta model has one too.

    >>> import qtk, torch
    >>> sim = qtk.QuantSim(nn.Linear(8, 4), torch.randn(2, 8), weight_bits=4)
    >>> footprint(sim.model)
    Footprint(float_bytes=144, codes_bytes=16, scales_bytes=16, left_bytes=16)
    """
    stored = stored_bytes(model).values()
    codes, scales = sum(codes for codes, _ in stored), sum(scales for _, scales in stored)
    own = {p: p.numel() * p.element_size() for name, p in model.named_parameters() if QUANTIZERS not in name.split(".")}
    quantized = quantized_parameters(model)
    left = sum(size for parameter, size in own.items() if parameter not in quantized)
    return Footprint(sum(own.values()), codes, scales, left)


def stored_bytes(model: nn.Module) -> dict[Quantizer, tuple[int, int]]:
    """Quantizer of parameters → bytes of the codes, and of scales and zero points, as in ``Footprint``."""
    stored: dict[Quantizer, tuple[int, int]] = {}
    for graph in graphs(model).values():
        flow = Flow(graph.graph)
        for node, quantizer in quantizer_nodes(graph).items():
            if not flow.is_static(node) or quantizer in stored:
                continue
            shape, spec, scales = tuple(node.meta["val"].shape), quantizer.spec, 0
            if not isinstance(quantizer, BiasQuantizer):  # whose scale follows from two others
                each = (SCALE_BYTES if spec.scale_format is None else 1) + (0 if spec.symmetric else ZERO_POINT_BYTES)
                scales = math.prod(spec.granularity.qparam_shape(shape)) * each
            stored[quantizer] = math.ceil(math.prod(shape) * spec.dtype.bits / 8), scales
    return stored
