"""The values of quantized sites while a simulation runs, by site and by how often the site ran."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, fx, nn

from qtk.data.valid_tokens import ValidTokens
from qtk.export.simulated_sites import SimulatedSite, StepSize, simulated_sites, step_of
from qtk.quantizers.quantizer import Quantizer


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedValue:
    """A value that what a runtime computes is compared with.

    Args:
        value: the value.
        step: the scale of its quantizer, which broadcasts; ``None`` without one.
        counted: which elements are compared, bool of the shape of ``value``; ``None``: all.
    """

    value: Tensor
    step: StepSize = None
    counted: Tensor | None = None


class SimulatedValues:
    """Records what the quantizers of a graph return. Close it when done: it hooks into them.

    A quantizer that several sites share is called in the order of its sites, over and over in a loop that a file holds
    unrolled. Sites inside a loop that a file keeps are not recorded, nor sites that share a quantizer with one.

    Args:
        graph: a simulating graph.
        steps: site → the ordinal of its last node in the file.
        tokens: which elements of a value count; ``None``: all.
    """

    def __init__(
        self, graph: fx.GraphModule, steps: Mapping[str, int], tokens: ValidTokens | None = None
    ) -> None:
        self._sites: dict[Quantizer, list[SimulatedSite]] = defaultdict(list)
        for site in simulated_sites(graph):
            self._sites[site.quantizer].append(site)
        self._steps, self._tokens = steps, tokens
        self._values: dict[Quantizer, list[SimulatedValue]] = defaultdict(list)
        self._handles = [quantizer.register_forward_hook(self._record) for quantizer in self._sites]

    def take(self) -> dict[tuple[str, int], SimulatedValue]:
        """Site and ordinal → value and scale, since the last call."""
        taken: dict[tuple[str, int], SimulatedValue] = {}
        for quantizer, sites in self._sites.items():
            calls = [
                (step, position) for position, site in enumerate(sites)
                for step in range((0 if site.constant is not None else self._steps.get(site.name, -1)) + 1)
            ]
            values = self._values[quantizer]
            if len(calls) == len(values):
                for (step, position), value in zip(sorted(calls), values, strict=True):
                    taken[sites[position].name, step] = value
        self._values.clear()
        return taken

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()

    def _record(self, quantizer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(quantizer, Quantizer)
        counted = None if self._tokens is None else self._tokens.counted(quantizer, output)
        self._values[quantizer].append(SimulatedValue(output.detach(), step_of(quantizer, output, inputs[0]), counted))
