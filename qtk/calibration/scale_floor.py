"""Keeps weight scales so large that every int32 bias fits into its codes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

import torch
from torch import Tensor

from qtk.core.dtypes import INT32
from qtk.core.encoding import HOST, Encoding, encodings_to, moved
from qtk.core.site import Site
from qtk.errors import EncodingError
from qtk.graph.evaluate import static_values
from qtk.graph.simulation import Simulation
from qtk.nn.device import device_of
from qtk.quantizers.modes import read_encodings

MARGIN = 1 + 2.0**-20
"""Covers the rounding of scales and of their product to float32."""


def raise_scales(simulation: Simulation, weights: Collection[Site] | None = None) -> None:
    """Raises weight scales to where |bias / (input scale · weight scale)| < 2³⁰. Changes encodings.

    A channel of tiny weights with an ordinary bias would otherwise need codes beyond int32. Its weights lose precision
    that the sum with the bias does not have in float32 either.

    Args:
        simulation: calibrated or not; biases without scales are left out.
        weights: the sites whose encodings may change; ``None``: sites that are not frozen.
    """
    plan, quantizers = simulation.plan, simulation.quantizers
    biases = {site: decided.factors for site, decided in plan.items() if decided.factors and quantizers[site].ready}
    if not biases:
        return
    floors: dict[Site, list[Tensor]] = defaultdict(list)
    values = {site: bias.detach().double().abs() for site, bias in static_values(simulation.model, biases)}
    magnitudes = dict(zip(values, moved(list(values.values()), HOST), strict=True))
    encodings = _encodings(simulation, {factor for site in magnitudes for factor in biases[site]})
    for bias, magnitude in magnitudes.items():
        of_input, of_weight = biases[bias]
        scale = encodings[of_input].scale.double()
        floors[plan[of_weight].leader or of_weight].append(magnitude / scale / INT32.maximum * MARGIN)
    raised: dict[Site, Encoding] = {}
    encodings |= _encodings(simulation, set(floors) - set(encodings))
    for site, minima in floors.items():
        encoding = encodings[site]
        per_channel = encoding.scale.numel() > 1
        scale = encoding.scale
        for minimum in minima:
            floor = minimum if per_channel else minimum.max().reshape(1)
            scale = torch.maximum(scale, floor.to(scale))
        may_change = site in weights if weights is not None else not quantizers[site].frozen
        if may_change and not torch.equal(scale, encoding.scale):
            raised[site] = Encoding(encoding.spec, scale, encoding.zero_point)
    on_device = encodings_to(list(raised.values()), device_of(simulation.model))
    for site, encoding in zip(raised, on_device, strict=True):
        quantizer = quantizers[site]
        frozen, quantizer.frozen = quantizer.frozen, False
        quantizer.load_encoding(encoding)
        quantizer.frozen = frozen


def _encodings(simulation: Simulation, sites: Collection[Site]) -> dict[Site, Encoding]:
    """The encodings of ``sites`` on the CPU. Raises: EncodingError if one is not valid."""
    encodings = {}
    for site, encoding in zip(sites, read_encodings([simulation.quantizers[site] for site in sites]), strict=True):
        if isinstance(encoding, EncodingError):
            raise encoding
        assert encoding is not None
        encodings[site] = encoding
    return encodings
