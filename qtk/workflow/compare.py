"""Compares the simulation with float at every site, in one pass over the data."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from qtk.core.site import Site
from qtk.graph.simulation import Simulation
from qtk.numerics.affine import expand
from qtk.numerics.error import decibels
from qtk.planning.selection import leaders
from qtk.quantizers.modes import in_mode
from qtk.quantizers.quantizer import Mode, Quantizer
from qtk.workflow.forward_pass import Batch, Forward, outputs, run_batch


@dataclass(frozen=True, slots=True)
class SiteError:
    """Error at one site over all data.

    Args:
        site: name of the site.
        sqnr_db: 10·log10(Σ float² / Σ (simulated - float)²), in dB.
        max_error_scales: largest absolute error, each in units of the scale of its own channel or block; NaN where each
            tensor has its own.
        unpaired: simulated calls without a float call of the same shape, because the model took another path (a router
            that sends tokens elsewhere); they are not counted, and if there are no others ``sqnr_db`` is NaN.
    """

    site: str
    sqnr_db: float
    max_error_scales: float
    unpaired: int = 0


@dataclass(slots=True)
class _Sums:
    signal: float = 0.0
    noise: float = 0.0
    worst: float = 0.0
    unpaired: int = 0

    def add(self, reference: Tensor, value: Tensor, quantizer: Quantizer) -> None:
        difference = (value - reference).double()
        self.signal += float(reference.double().square().sum())
        self.noise += float(difference.square().sum())
        if quantizer.encoding is not None and difference.numel():
            scale, block_size = quantizer.encoding.scale, quantizer.spec.granularity.block_size(value.ndim)
            self.worst = max(self.worst, float((difference / expand(scale, value.shape, block_size)).abs().max()))

    @property
    def sqnr_db(self) -> float:
        return math.nan if self.unpaired and not self.signal else decibels(self.signal, self.noise)


def compare(
    simulation: Simulation,
    data: Iterable[Batch],
    *,
    forward: Forward | None = None,
    num_batches: int | None = None,
    progress: bool = True,
) -> list[SiteError]:
    """The error at every leader, worst SQNR first, NaN last.

    Each batch runs in float, its values kept, then simulated. The error of an activation is the one accumulated up to
    that site, so that the order says where an error is large, not which site makes it; the float values of one batch
    are held in memory at a time.
    """
    quantizers = {site: simulation.quantizers[site] for site in leaders(simulation.plan)}
    sums = {site: _Sums() for site in quantizers}
    references: dict[Site, list[Tensor]] = {site: [] for site in quantizers}
    simulating = False

    def hook(site: Site) -> object:
        def record(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if not simulating:
                references[site].append(inputs[0].detach())
            else:
                reference = references[site].pop(0) if references[site] else None
                if reference is None or reference.shape != output.shape:
                    sums[site].unpaired += 1
                else:
                    sums[site].add(reference, output.detach(), quantizers[site])

        return record

    def both(module: nn.Module, batch: Batch) -> object:
        nonlocal simulating
        run = forward or run_batch
        simulating = False
        for values in references.values():
            values.clear()
        with in_mode(simulation.quantizers.values(), Mode.BYPASS):
            run(module, batch)
        simulating = True
        return run(module, batch)

    handles = [each.register_forward_hook(hook(site)) for site, each in quantizers.items()]  # type: ignore[arg-type]
    try:
        for _ in outputs(
            simulation.model, data, forward=both, num_batches=num_batches, label="comparing", progress=progress
        ):
            pass
    finally:
        for handle in handles:
            handle.remove()
    errors = [
        SiteError(site.name, total.sqnr_db, math.nan if quantizers[site].spec.dynamic else total.worst, total.unpaired)
        for site, total in sums.items()
    ]
    return sorted(errors, key=lambda error: (math.isnan(error.sqnr_db), error.sqnr_db))

