"""Keeps weight scales so large that every int32 bias fits into its codes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

import torch
from torch import Tensor

from qtk.core.dtypes import INT32
from qtk.core.encoding import Encoding
from qtk.core.site import Site
from qtk.graph.simulation import Simulation
from qtk.graph.static_values import static_values

MARGIN = 1 + 2.0**-20
"""Covers the rounding of scales and of their product to float32."""


def raise_scales(simulation: Simulation, weights: Collection[Site] | None = None) -> None:
    """Raises weight scales to where |bias / (input scale · weight scale)| < 2³⁰. Changes encodings.

    A channel of tiny weights with an ordinary bias would otherwise need codes beyond int32. Its weights lose precision
    that the sum with the bias does not have in float32 either.

    Args:
        simulation: calibrated or not; biases without scales are left out.
        weights: the sites whose encodings may change; ``None``: those that are not frozen.
    """
    plan, quantizers = simulation.plan, simulation.quantizers
    biases = {site: decided.factors for site, decided in plan.items() if decided.factors and quantizers[site].ready}
    floors: dict[Site, list[Tensor]] = defaultdict(list)
    for site, bias in static_values(simulation.model, biases):
        of_input, of_weight = biases[site]
        encoding = quantizers[of_input].encoding
        assert encoding is not None
        magnitude = bias.detach().double().abs()
        floors[plan[of_weight].leader or of_weight].append(magnitude / encoding.scale.double() / INT32.maximum * MARGIN)
    for site, minima in floors.items():
        quantizer, encoding = quantizers[site], quantizers[site].encoding
        assert encoding is not None
        per_channel = encoding.scale.numel() > 1
        scale = encoding.scale
        for minimum in minima:
            floor = minimum if per_channel else minimum.max().reshape(1)
            scale = torch.maximum(scale, floor.to(scale))
        frozen = quantizer.frozen
        if not torch.equal(scale, encoding.scale) and (site in weights if weights is not None else not frozen):
            quantizer.frozen = False
            quantizer.load_encoding(Encoding(encoding.spec, scale, encoding.zero_point))
            quantizer.frozen = frozen
