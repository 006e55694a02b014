"""Compares the simulation with float at every site, in one pass over the data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from qtk.core.encoding import Encoding
from qtk.core.plan import leaders
from qtk.core.site import Site
from qtk.core.spec import QuantSpec
from qtk.data.forward_pass import Batch, Forward, outputs, run_batch
from qtk.data.rolled_states import written_places
from qtk.data.valid_tokens import Valid, ValidTokens
from qtk.graph.simulation import Simulation
from qtk.graph.site_calls import SiteCalls
from qtk.layerwise.float_weights import FloatWeights
from qtk.nn.kept_buffers import BufferValues, buffers_kept
from qtk.numerics.clipping import count_clipped, in_scales, range_filled
from qtk.numerics.error import decibels
from qtk.quantizers.modes import in_mode
from qtk.quantizers.quantizer import Mode, Quantizer
from qtk.report.site_errors import SiteError, SiteErrors


@dataclass(slots=True)
class _Sums:
    signal: float = 0.0
    noise: float = 0.0
    worst: float = 0.0
    unpaired: int = 0
    not_finite: int = 0
    own_signal: float = 0.0
    own_noise: float = 0.0
    elements: int = 0
    clipped: int = 0
    lowest: float = 0.0
    highest: float = 0.0
    ranged: bool = False

    def add(self, reference: Tensor, value: Tensor, quantizer: Quantizer) -> None:
        difference = (value - reference).double()
        self.not_finite += int((reference.isfinite() & ~value.isfinite()).sum())
        self.signal += float(reference.double().square().sum())
        self.noise += float(difference.square().sum())
        if (encoding := quantizer.encoding) is not None and difference.numel():
            self.worst = max(self.worst, float(in_scales(difference, encoding).abs().max()))

    def add_own(self, reference: Tensor, quantized: Tensor, encoding: Encoding | None) -> None:
        """Adds a float value and what its quantizer alone makes of it; ``encoding`` of the range it is clipped to."""
        self.own_signal += float(reference.double().square().sum())
        self.own_noise += float((quantized - reference).double().square().sum())
        self.elements += reference.numel()
        if encoding is not None and reference.numel():
            self.ranged = True
            scaled = in_scales(reference, encoding)
            self.clipped += count_clipped(scaled, encoding)
            lowest, highest = scaled.aminmax()
            self.lowest, self.highest = min(self.lowest, float(lowest)), max(self.highest, float(highest))

    def error(self, site: Site, spec: QuantSpec, encoding: Encoding | None) -> SiteError:
        return SiteError(
            site.name, math.nan if self.not_finite or (self.unpaired and not self.signal) else decibels(
                self.signal, self.noise),
            math.nan if spec.dynamic else self.worst, self.unpaired,
            decibels(self.own_signal, self.own_noise) if self.elements else math.nan,
            self.clipped / max(self.elements, 1),
            math.nan if encoding is None or not self.ranged else range_filled(self.lowest, self.highest, spec),
            self.not_finite,
        )


def compare(
    simulation: Simulation,
    data: Iterable[Batch],
    *,
    forward: Forward | None = None,
    num_batches: int | None = None,
    progress: bool = True,
    valid: Valid | None = None,
) -> SiteErrors:
    """Measures own and accumulated error and share clipped at every site, worst own error first; prints as a table.

    Sites where the simulation alone is NaN or infinite come first, in order of execution: the first is the cause.

    >>> import qtk, torch
    >>> sim, batches = qtk.QuantSim(torch.nn.Linear(4, 2).eval(), torch.randn(8, 4)), [torch.randn(8, 4)]
    >>> sim.compute_encodings(batches, progress=False)
    >>> sim.set_range("input:input", low=-0.1, high=0.1)
    >>> worst = sim.compare(batches, progress=False)[0]
    >>> worst.site, worst.clipped > 0.5, worst.own_sqnr_db < 6
    ('input:input', True, True)

    Each batch runs in float, its values kept, then simulated; the float values of one batch are held in memory at a
    time. The own error of a site is the error that its quantizer makes on the float model's value, whatever other sites
    do; the accumulated error is the error of the simulated value, all the sites before it included. A quantizer that is
    bypassed makes none. Where a layer-wise method has rewritten a weight, the float model has the weight that it had
    before.

    Args:
        simulation: calibrated.
        data: batches.
        forward: as for ``compute_encodings``.
        num_batches: as for ``compute_encodings``.
        progress: show a bar.
        valid: which tokens count, where they can be followed, as for ``compute_encodings``.

    Returns: the errors at every site, also of each that shares a range.

    Raises: CalibrationError without data, or for ``valid`` that gives no mask.
    """
    comparison = _Comparison(simulation, forward, ValidTokens(simulation.model, valid))
    with comparison.listening():
        for _ in outputs(simulation.model, data, forward=comparison.run_both, num_batches=num_batches,
                         label="comparing", progress=progress):
            pass
    return comparison.errors()


class _Comparison:
    """The errors so far, and the float values of the batch that runs."""

    def __init__(self, simulation: Simulation, forward: Forward | None, tokens: ValidTokens) -> None:
        self._simulation, self._forward, self._tokens = simulation, forward, tokens
        self._quantizers = {site: simulation.quantizers[site] for site in leaders(simulation.plan)}
        self._calls = SiteCalls(simulation, self._quantizers)
        self._sums = {site: _Sums() for site in self._calls.sites}
        self._references: dict[Site, list[Tensor]] = {site: [] for site in self._calls.sites}
        self._modes = {quantizer: quantizer.mode for quantizer in self._quantizers.values()}
        self._float_weights = FloatWeights(simulation)
        self._executed: dict[Site, None] = {}
        self._simulating = False
        self._held = {  # by the model, which has other numbers in them when the simulation runs
            tensor.untyped_storage().data_ptr()
            for tensor in (*simulation.model.parameters(), *simulation.model.buffers())
        }

    @contextmanager
    def listening(self) -> Iterator[None]:
        """While active, the quantizers' values are recorded; warns of sites whose tokens are not followed."""
        handles = [quantizer.register_forward_hook(self._record) for quantizer in self._quantizers.values()]
        try:
            with self._tokens.listening(), self._calls.followed():
                yield
        finally:
            for handle in handles:
                handle.remove()
        self._tokens.warn_of_unfollowed({quantizer: site.name for site, quantizer in self._quantizers.items()})

    def run_both(self, module: nn.Module, batch: Batch) -> object:
        """Runs a batch in float, then simulated."""
        run = self._tokens.forward(self._forward) or run_batch
        self._simulating = False
        for values in self._references.values():
            values.clear()
        places = written_places(module)
        before = BufferValues(places)
        with in_mode(self._simulation.quantizers.values(), Mode.BYPASS), self._float_weights.in_place():
            run(module, batch)
        self._simulating = True
        with buffers_kept(places):  # the next batch finds what the float model leaves
            before.restore()
            return run(module, batch)

    def errors(self) -> SiteErrors:
        """The errors of all batches."""
        shared = self._simulation.quantizers
        in_order = dict.fromkeys((*self._executed, *self._sums))
        return SiteErrors.ranked(
            self._sums[site].error(site, shared[site].spec, shared[site].encoding) for site in in_order)

    def _record(self, quantizer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(quantizer, Quantizer)
        site, rows = self._calls.site_of_next(quantizer), self._tokens.selector(quantizer)
        value = rows(output if self._simulating else inputs[0]).detach()
        references, sums = self._references[site], self._sums[site]
        if not self._simulating:
            references.append(value.clone() if value.untyped_storage().data_ptr() in self._held else value)
            if self._modes[quantizer] is Mode.SIMULATE:
                with in_mode([quantizer], Mode.SIMULATE):
                    own = quantizer.forward(self._float_weights.rounded.get(quantizer, inputs[0]))
                sums.add_own(value, rows(own).detach(), quantizer.encoding)
            else:
                sums.add_own(value, value, None)
        else:
            self._executed[site] = None
            reference = references.pop(0) if references else None
            if reference is None or reference.shape != value.shape:
                sums.unpaired += 1
            else:
                sums.add(reference, value, quantizer)
