"""Counts the rows that meet each matrix of a stack while a model is calibrated; warns of experts without any."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, fx

from qtk.graph.simulation import Simulation
from qtk.layerwise.input_taps import input_taps
from qtk.layerwise.weighted_layers import WeightedLayer, weighted_layers
from qtk.moments.matrix_rows import MatrixRows

LISTED = 3


@contextmanager
def matrices_counted(simulation: Simulation) -> Iterator[None]:
    """Warns after the body, in which the model runs, of matrices that data could have reached and did not."""
    with matrices_met(simulation) as counts:
        yield
    _warn({name: count for name, count in counts.items() if bool((count == 0).any()) and bool(count.any())})


@contextmanager
def matrices_met(simulation: Simulation) -> Iterator[dict[str, Tensor]]:
    """Counts, while the body runs the model, the rows that each matrix of a stack meets: weight → counts [matrices]."""
    stacks = _routed_stacks(simulation)
    if not stacks:
        yield {}
        return
    counts = {layer.name: torch.zeros(layer.geometry.groups, dtype=torch.int64) for layer in stacks}
    names = {op: layer.name for layer in stacks for op in layer.uses}

    def count(x: Tensor | MatrixRows, weight: Tensor, op: fx.Node | None) -> None:
        if isinstance(x, MatrixRows) and op is not None:
            counts[names[op]] += torch.tensor(x.counts)

    uses = {op: use for layer in stacks for op, use in layer.uses.items()}
    with input_taps(simulation.model, count, uses, only_uses=True):
        yield counts


def _routed_stacks(simulation: Simulation) -> list[WeightedLayer]:
    """The weights that are stacks of matrices, of which data decide which rows meet which."""
    layers, _ = weighted_layers(simulation.model, simulation.plan)
    return [layer for layer in layers if layer.matrices and any(use.is_routed for use in layer.uses.values())]


def _warn(missed: dict[str, Tensor]) -> None:
    if not missed:
        return
    named = "; ".join(
        f"{name}: {int((count == 0).sum())} of {len(count)} "
        f"({', '.join(str(int(index)) for index in (count == 0).nonzero()[:LISTED])}"
        f"{', …' if int((count == 0).sum()) > LISTED else ''})" for name, count in list(missed.items())[:LISTED]
    )
    warnings.warn(
        f"no row of the data met some matrices (experts) of {len(missed)} weights: {named}"
        f"{'; …' if len(missed) > LISTED else ''}; ranges of activations do not cover them: calibrate with more data, "
        "that reach all of them", stacklevel=4,
    )
