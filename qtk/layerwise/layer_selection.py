"""Selects the layers of a simulation that layer-wise methods can improve."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from qtk.core.plan import leaders
from qtk.errors import CalibrationError
from qtk.graph.simulation import Simulation
from qtk.layerwise.methods import LayerwiseMethod
from qtk.layerwise.originals import frozen_before
from qtk.layerwise.weighted_layers import WeightedLayer, weighted_layers


def select_layers(
    simulation: Simulation, methods: Sequence[LayerwiseMethod], sites: Iterable[str] | str | None
) -> tuple[list[WeightedLayer], dict[str, str]]:
    """The selected layers that all methods can work on, and the reason for every other selected weight.

    Raises: CalibrationError if there is no such layer, or for a name of no site.
    """
    every_layer, skipped = weighted_layers(simulation.model, simulation.plan)
    selected = {site.name for site in leaders(simulation.plan, sites)}
    layers = []
    for layer in every_layer:
        reason = _reason_to_skip(layer, methods)
        if reason is None and layer.name in selected:
            layers.append(layer)
        elif reason is not None:
            skipped[layer.name] = reason
    skipped = {name: reason for name, reason in skipped.items() if name in selected}
    if not layers:
        reasons = "".join(f"\n  {name}: {reason}" for name, reason in list(skipped.items())[:5])
        raise CalibrationError(f"no layer to work on: none of the {len(selected)} sites is the weight of a matrix "
                               f"product or convolution{reasons}")
    return layers, skipped


def _reason_to_skip(layer: WeightedLayer, methods: Sequence[LayerwiseMethod]) -> str | None:
    if any(method.searches_scale for method in methods) and frozen_before(layer):
        return "its encoding is frozen; sim.unfreeze(name) first"
    if layer.quantizer.learns_range:
        return "its range is being learned; run sim.fix_ranges() first"
    if layer.bias is None and all(method.needs_bias for method in methods):
        return "it has no bias to correct"
    if layer.uses and any(method.required_statistics(None).sample_rows for method in methods):
        return "is a stack of matrices or moved before it is multiplied: no rows of its input are kept for such a loss"
    reasons = (method.refuses(layer.quantizer.spec) for method in methods)
    return next((reason for reason in reasons if reason is not None), None)
