"""``Analysis``: the methods of a simulation that say which site loses how much."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from qtk.data.forward_pass import Batch, Forward
from qtk.data.valid_tokens import Valid
from qtk.graph.simulation import Simulation
from qtk.public import public
from qtk.report.account import Account

if TYPE_CHECKING:
    from qtk.report.drift import Drift
    from qtk.report.sensitivities import Sensitivities
    from qtk.report.site_errors import SiteErrors


@public
class Analysis:
    """Base of ``QuantSim``: what compares it with float. Every method calls one function."""

    simulation: Simulation

    def compare(
        self, data: Iterable[Batch], *, forward: Forward | None = None, num_batches: int | None = None,
        progress: bool = True, valid: Valid | None = None,
    ) -> SiteErrors:
        """Own and accumulated error and share clipped at every site, worst own error first; prints as a table.

        >>> import qtk, torch
        >>> sim, batches = qtk.QuantSim(torch.nn.Linear(4, 2).eval(), torch.randn(8, 4)), [torch.randn(8, 4)]
        >>> sim.compute_encodings(batches, progress=False)
        >>> sim.set_range("input:input", low=-0.1, high=0.1)
        >>> worst = sim.compare(batches, progress=False)[0]
        >>> worst.site, worst.clipped > 0.5, worst.own_sqnr_db < 6
        ('input:input', True, True)

        The own error is what a site makes of the float model's value, whatever the other sites do, so that the one
        that broke the model comes first; ``valid`` and the rest as in ``compute_encodings``.
        """
        from qtk.workflow.compare import compare

        return compare(self.simulation, data, forward=forward, num_batches=num_batches, progress=progress, valid=valid)

    def sensitivity(
        self, data: Iterable[Batch], *, loss: Callable[[object, Batch], Tensor | float] | None = None, top: int = 10,
        groups: Iterable[str] | str | None = None, forward: Forward | None = None, num_batches: int | None = None,
        progress: bool = True, valid: Valid | None = None,
    ) -> Sensitivities:
        """How much the loss rises when a site alone is quantized: estimated for all, measured for the ``top`` worst.

        >>> import qtk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).eval()
        >>> sim, batches = qtk.QuantSim(model, torch.randn(8, 8)), [torch.randn(64, 8)]
        >>> sim.compute_encodings(batches, progress=False)
        >>> sim.set_range("1:out", low=0.0, high=0.01)
        >>> sim.sensitivity(batches, progress=False)[0].name
        '1:out'

        Modules as groups, and a loss of one's own:

        >>> loss = lambda output, batch: output.square().mean()
        >>> sorted(row.name for row in sim.sensitivity(batches, loss=loss, groups="?", top=0, progress=False))
        ['0', '1', '2', 'input:input']

        Args:
            data: batches; a source that can be read once is kept in memory.
            loss: ``loss(outputs, batch)``; ``None``: error of the outputs relative to their power, ``10^(-SQNR/10)``.
            top: how many rows are measured, which costs two runs over the data each.
            groups: paths of modules, or globs over them, whose sites are switched together.
            forward: as for ``compute_encodings``.
            num_batches: as for ``compute_encodings``.
            progress: as for ``compute_encodings``.
            valid: as for ``compute_encodings``; not beside a loss, which says itself what counts.

        Raises: CalibrationError without data, for a loss that is not finite, no number or without gradient, a group
            that matches nothing, or ``valid`` beside a loss.
        """
        from qtk.workflow.sensitivity import sensitivity

        return sensitivity(self.simulation, data, loss=loss, top=top, groups=groups, forward=forward,
                           num_batches=num_batches, progress=progress, valid=valid)

    def drift(
        self, data: Iterable[Batch], *, steps: int | None = None, forward: Forward | None = None, progress: bool = True,
    ) -> Drift:
        """How far a model with states leaves float along a sequence: the SQNR of each step, and a verdict.

        >>> import qtk, torch
        >>> class Stream(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.cell, self.head = torch.nn.GRUCell(4, 8), torch.nn.Linear(8, 2)
        ...     def forward(self, x, h):
        ...         h = self.cell(x, h)
        ...         return self.head(h), h
        >>> steps, zero = torch.randn(50, 2, 4), torch.zeros(2, 8)
        >>> batches = [(x, zero) for x in steps]
        >>> sim = qtk.QuantSim(Stream().eval(), batches[0], states={"h": 1})
        >>> sim.compute_encodings(batches, progress=False)
        >>> sim.drift(batches, steps=200, progress=False).is_bounded
        True

        Arguments: ``qtk.workflow.drift``.
        """
        from qtk.workflow.drift import drift

        return drift(self.simulation, data, steps=steps, forward=forward, progress=progress)

    def report(
        self, path: str | os.PathLike[str], data: Iterable[Batch], *, title: str = "Quantized model",
        forward: Forward | None = None, num_batches: int | None = None, sensitivity: bool = True,
        account: Account | None = None, headline: Mapping[str, str] | None = None, force: bool = False,
        progress: bool = True, valid: Valid | None = None, data_name: str = "the data given",
    ) -> None:
        """Writes a page of HTML to look at: errors and ranges of the sites, what each costs, and the plan.

        >>> import pathlib, qtk, tempfile, torch
        >>> sim, batches = qtk.QuantSim(torch.nn.Linear(4, 2).eval(), torch.randn(8, 4)), [torch.randn(8, 4)]
        >>> sim.compute_encodings(batches, progress=False)
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "report.html"
        >>> sim.report(path, batches, progress=False)

        Further arguments: ``qtk.workflow.report``.
        """
        from qtk.workflow.report import report

        report(self.simulation, path, data, title=title, forward=forward, num_batches=num_batches,
               sensitivity=sensitivity, account=account, headline=headline, force=force, progress=progress,
               valid=valid, data_name=data_name)
