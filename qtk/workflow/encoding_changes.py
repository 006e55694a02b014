"""``EncodingChanges``: the methods of a simulation that set, load, fix and delete encodings."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from qtk.graph.simulation import Simulation
from qtk.public import public

if TYPE_CHECKING:
    from qtk.workflow.load_encodings import LoadedEncodings


@public
class EncodingChanges:
    """Base of ``QuantSim``: what sets, loads, fixes and deletes encodings. Every method calls one function."""

    simulation: Simulation

    def load_encodings(
        self, source: str | os.PathLike[str] | Mapping[str, object], *, strict: bool = True, partial: bool = False,
        freeze: bool = True,
    ) -> LoadedEncodings:
        """Loads encodings from a file of ``sim.export``, or from one of AIMET's; all of it, or nothing.

        >>> import pathlib, qtk, tempfile, torch
        >>> model, x = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU()).eval(), torch.randn(16, 8)
        >>> sim = qtk.QuantSim(model, x)
        >>> sim.compute_encodings([x], progress=False)
        >>> folder = pathlib.Path(tempfile.mkdtemp()) / "exported"
        >>> sim.export(folder, formats="encodings")
        >>> again = qtk.QuantSim(model, x)
        >>> loaded = again.load_encodings(folder / "encodings_aimet_1.0.0.json")
        >>> len(loaded.loaded), loaded.frozen
        (3, True)
        >>> torch.equal(again.model(x), sim.model(x))
        True

        From another simulation, weights alone, free to be computed anew:

        >>> weights = {name: each for name, each in sim.encodings().items() if name.endswith("weight")}
        >>> print(again.load_encodings(weights, partial=True, freeze=False))
        the mapping: 1 encodings loaded
        missing: input:input, 1:out

        The format is found by itself: qtk's own, or AIMET's schema 0.6.1, 1.0.0, 2.0.0 or 2.1.0. Entries have the
        names that ``export`` gives tensors, those of torch's TorchScript exporter, or those of modules; beside an ONNX
        file of the same name also those of its inputs, outputs and of torch's other exporter.

        Args:
            source: a file, its content as JSON values, or site name → encoding. Frozen encodings are replaced too.
            strict: an entry of no site is an error; else it is ignored. Of AIMET's, entries of values that an operator
                only moved are always ignored: such a value has the encoding of what was moved.
            partial: a site without an entry keeps what it has; else that is an error.
            freeze: freeze what was loaded, so that ``compute_encodings`` keeps it.

        Raises: EncodingError listing what does not fit: names, widths, symmetry, shapes, numbers that are not finite;
            nothing has changed then.
        """
        from qtk.workflow.load_encodings import load_encodings

        return load_encodings(self, source, strict=strict, partial=partial, freeze=freeze)

    def set_range(self, sites: str, low: float, high: float) -> None:
        """Sets the range of a site, or of all sites that match a glob, to [low, high], and freezes it.

        >>> import qtk, torch
        >>> sim = qtk.QuantSim(torch.nn.ReLU(), torch.randn(8, 4))
        >>> sim.set_range("relu:out", 0.0, 6.0)

        Raises: CalibrationError if there is no such site, low < high does not hold, a bound is not finite, or a site is
            quantized dynamically or has several scales whose number is not known yet.
        """
        from qtk.workflow.ranges import set_range

        set_range(self.simulation, sites, low, high)

    def freeze(self, sites: Iterable[str] | str | None = None) -> None:
        """Freezes the encodings of the named sites, or of all: fixed, also if they were learned, until ``unfreeze``.

        >>> import qtk, torch
        >>> sim = qtk.QuantSim(torch.nn.Linear(4, 2).eval(), torch.randn(8, 4))
        >>> sim.freeze()
        >>> sim.unfreeze("input:input")
        >>> [name for name, quantizer in sim.quantizers.items() if quantizer.frozen]
        ['weight', 'linear:out']

        Raises: CalibrationError if there is no such site.
        """
        from qtk.workflow.ranges import freeze

        freeze(self.simulation, sites, frozen=True)

    def unfreeze(self, sites: Iterable[str] | str | None = None) -> None:
        """Unfreezes what ``freeze``, ``set_range`` or a layer-wise method froze. Raises: as ``freeze``."""
        from qtk.workflow.ranges import freeze

        freeze(self.simulation, sites, frozen=False)

    def forget(self, sites: Iterable[str] | str | None = None) -> None:
        """Deletes encodings, e.g. of changed weights; ``compute_encodings(data, only_missing=True)`` computes new ones.

        >>> import qtk, torch
        >>> sim = qtk.QuantSim(torch.nn.Linear(4, 2).eval(), torch.randn(8, 4))
        >>> sim.compute_encodings([torch.randn(8, 4)], progress=False)
        >>> sim.forget("*weight")

        Raises: CalibrationError if there is no such site; EncodingError if an encoding is frozen.
        """
        from qtk.workflow.ranges import forget

        forget(self.simulation, sites)
