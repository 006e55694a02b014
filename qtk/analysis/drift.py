"""Measures how far a simulation with states leaves the float model along a sequence."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from torch import Tensor

from qtk.data.forward_pass import Batch, Forward, in_memory, outputs
from qtk.data.rolled_states import NAME_STATES, written_places
from qtk.data.sequences import Sequences, like
from qtk.errors import CalibrationError
from qtk.graph.graphs import states_of
from qtk.graph.simulation import Simulation
from qtk.layerwise.float_weights import FloatWeights
from qtk.numerics.error import decibels
from qtk.quantizers.modes import in_mode
from qtk.quantizers.quantizer import Mode
from qtk.report.drift import Drift
from qtk.torch_private import pytree


def drift(
    simulation: Simulation, data: Iterable[Batch], *, steps: int | None = None, forward: Forward | None = None,
    progress: bool = True,
) -> Drift:
    """Measures the SQNR of the outputs, step by step: float and simulation each carry their own states and buffers.

    >>> import qtk, torch
    >>> class Stream(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.cell, self.head = torch.nn.GRUCell(4, 8), torch.nn.Linear(8, 2)
    ...     def forward(self, x, h):
    ...         h = self.cell(x, h)
    ...         return self.head(h), h
    >>> batches = [(x, torch.zeros(2, 8)) for x in torch.randn(50, 2, 4)]
    >>> sim = qtk.QuantSim(Stream().eval(), batches[0], states={"h": 1})
    >>> sim.compute_encodings(batches, progress=False)
    >>> sim.drift(batches, steps=200, progress=False).is_bounded
    True

    Args:
        simulation: of a model with states.
        data: the batches of one sequence, in order, or ``qtk.Sequences``.
        steps: how many steps; beyond the last batch the first follows again. ``None``: one for each batch.
        forward: as for ``compute_encodings``.
        progress: show bars.

    Raises: CalibrationError without states or data, if ``steps`` is not positive, or if the batches follow again and
        are no whole sequences.
    """
    states = states_of(simulation.model)
    if not states and not written_places(simulation.model):
        raise CalibrationError("drift is measured between calls that return states for the next one, and this "
                               f"simulation has no states; {NAME_STATES}")
    if steps is not None and steps < 1:
        raise CalibrationError(f"steps must be at least 1, or None for one a batch; got {steps}")
    batches = in_memory(data, None)
    total = len(batches) if steps is None else steps
    reset = batches.reset if isinstance(batches, Sequences) and not callable(batches.reset) else 1
    if total > len(batches) and len(batches) % reset:
        raise CalibrationError(f"{len(batches)} batches are no whole sequences of {reset}, so they cannot follow one "
                               f"another for {total} steps; give at most {len(batches)} steps, or "
                               f"{len(batches) // reset * reset or reset} batches")
    sequence = like(batches, [*itertools.islice(itertools.cycle(batches), total)])

    def run(label: str) -> Iterable[list[Tensor]]:
        for output in outputs(simulation.model, sequence, forward=forward, num_batches=total, label=label,
                              progress=progress):
            leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
            others = [leaf for index, leaf in enumerate(leaves) if index not in states.values()]
            yield [leaf.double().cpu() for leaf in others or leaves if leaf.is_floating_point()]

    with in_mode(simulation.quantizers.values(), Mode.BYPASS), FloatWeights(simulation).in_place():
        expected = list(run("float"))
    found = []
    for wanted, simulated in zip(expected, run("simulation"), strict=True):
        power = sum(float(value.square().sum()) for value in wanted)
        noise = sum(float((a - b).square().sum()) for a, b in zip(wanted, simulated, strict=True))
        found.append(decibels(power, noise))
    return Drift(tuple(found))
