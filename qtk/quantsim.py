"""``QuantSim``: the handle a user holds. Every method calls one verb of ``qtk.workflow``."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from torch import nn

from qtk.calibrators.scheme import calibrator, canonical_scheme
from qtk.capture.prepared_model import PreparedModel
from qtk.config.load import load_config
from qtk.config.schema import QuantConfig, check_methods, check_op_names
from qtk.core.encoding import Encoding
from qtk.core.plan import QuantPlan
from qtk.errors import CaptureError
from qtk.graph.insert import insert
from qtk.graph.simulation import Simulation
from qtk.planning.planner import RULE_NAMES, plan
from qtk.quantizers.quantizer import Mode, Quantizer
from qtk.workflow.calibrate import calibrate
from qtk.workflow.check import check
from qtk.workflow.compare import SiteError, compare
from qtk.workflow.export import export
from qtk.workflow.feed import Batch, Data, Forward
from qtk.workflow.prepare import ExampleInputs, prepare_model
from qtk.workflow.ranges import forget, freeze, set_range
from qtk.workflow.store import load, restore, save, whole_state
from qtk.workflow.verify_export import ExportVerification, verify_export


class QuantSim:
    """Simulates a quantized model exactly, and trains, measures, saves and exports it.

    >>> import qtk, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU()).eval()
    >>> batches = [torch.randn(16, 8) for _ in range(4)]
    >>> sim = qtk.QuantSim(model, batches[0], weight_bits=4)
    >>> sim.compute_encodings(batches, progress=False)
    >>> sim.model(batches[0]).shape
    torch.Size([16, 4])

    Args:
        model: a float model, or one from ``prepare_model``.
        example_inputs: a tensor, tuple or dict the model runs on; its numbers do not matter.
        scheme: how ranges are found; a name from ``qtk.SCHEMES``, with settings if need be:
            ``percentile(quantile=0.999)``.
        weight_bits: width of weights, ``None`` to leave them in float; 8 gives way to a width in the config's defaults.
        activation_bits: width of activations likewise, ``None`` for a weight-only simulation.
        config: a shipped target's name, a path to YAML or AIMET JSON, or the parsed mapping.
        in_place: share the parameters of ``model`` instead of copying them.

    Raises: CaptureError if the model does not run or cannot be captured; ConfigError, SpecError for settings that do
        not fit it.
    """

    def __init__(
        self,
        model: nn.Module,
        example_inputs: ExampleInputs,
        *,
        scheme: str = "min_max",
        weight_bits: int | None = 8,
        activation_bits: int | None = 8,
        config: str | Path | Mapping[str, object] | QuantConfig = "default",
        in_place: bool = False,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise CaptureError(f"model must be a torch.nn.Module, got {model!r}; wrap a function in a module, "
                               "and pass an instance, not the class")
        if example_inputs is None:
            raise CaptureError("QuantSim needs example_inputs: a tensor, tuple or dict that the model runs on")
        self.scheme = canonical_scheme(scheme)
        self.weight_bits = weight_bits
        self.activation_bits = activation_bits
        self.config = load_config(config)
        check_op_names(self.config, RULE_NAMES)
        check_methods(self.config, calibrator)
        self.example_inputs = example_inputs
        prepared = model
        if not isinstance(prepared, PreparedModel) or not prepared.report.complete:
            prepared = prepare_model(model, example_inputs)
        self.model: PreparedModel = prepared if in_place else copy.deepcopy(prepared)
        self._plan = plan(
            self.model, self.config, weight_bits=weight_bits, activation_bits=activation_bits, scheme=self.scheme
        )
        self._quantizers = insert(self.model, self._plan)
        for quantizer in self._quantizers.values():
            quantizer.mode = Mode.SIMULATE

    @property
    def plan(self) -> QuantPlan:
        """Every site, how it is quantized and why, and what is left in float; printable."""
        return self._plan

    @property
    def quantizers(self) -> Mapping[str, Quantizer]:
        """Site name → its quantizer, in graph order; sites that share an encoding share the quantizer."""
        return MappingProxyType({site.name: self._quantizers[site] for site in self._plan})

    @property
    def simulation(self) -> Simulation:
        """Model, plan and quantizers as they are now: what the verbs take."""
        return Simulation(self.model, self._plan, {site: self._quantizers[site] for site in self._plan})

    def encodings(self) -> dict[str, Encoding]:
        """Site name → encoding, for every site that has one; a range taken at run time is none."""
        return {name: e for name, quantizer in self.quantizers.items() if (e := quantizer.encoding) is not None}

    def compute_encodings(
        self,
        data: Data | None,
        *,
        sites: Iterable[str] | str | None = None,
        only_missing: bool = False,
        forward: Forward | None = None,
        num_batches: int | None = None,
        progress: bool = True,
    ) -> None:
        """Finds every encoding that is not frozen: weights from their values, activations from one pass over ``data``.

        Under ``torchrun``, with a process group initialized, every rank passes its share of the data and all get the
        same encodings.

        Args:
            data: batches, or a function that runs the model over its own; ``None`` if only weights are quantized, or
                activations in ranges taken at run time.
            sites: names of the sites to calibrate, or globs over names; ``None``: all.
            only_missing: leave the encodings that there are, as after ``forget``.
            forward: how to run the model on a batch, e.g. ``lambda model, batch: model(batch[0])``.
            num_batches: stop after so many.
            progress: show a bar.

        Raises: CalibrationError naming site and batch for NaN or +inf, for no data; CheckError if anything in the
            plan is left without a sound encoding.
        """
        self._plan = calibrate(
            self.model, self._plan, self.quantizers, data, example=self.example_inputs, sites=sites,
            only_missing=only_missing, forward=forward, num_batches=num_batches, progress=progress,
        )
        if sites is None:
            self.check()

    def set_range(self, sites: str, low: float, high: float) -> None:
        """Gives a site, or all that a glob names, an encoding that just holds [low, high], and freezes it.

        Raises: CalibrationError if there is no such site or low < high does not hold.
        """
        set_range(self.model, self._plan, self.quantizers, sites, low, high)

    def freeze(self, sites: Iterable[str] | str | None = None) -> None:
        """Keeps the encodings of the named sites, or of all, as they are."""
        freeze(self._plan, self.quantizers, sites, frozen=True)

    def unfreeze(self, sites: Iterable[str] | str | None = None) -> None:
        """Lets encodings change again."""
        freeze(self._plan, self.quantizers, sites, frozen=False)

    def forget(self, sites: Iterable[str] | str | None = None) -> None:
        """Drops encodings, e.g. after weights changed; ``compute_encodings(data, only_missing=True)`` finds new ones.

        Raises: EncodingError if one is frozen.
        """
        forget(self._plan, self.quantizers, sites)

    def check(self) -> None:
        """Compares the simulation with its plan. Raises: CheckError listing every finding."""
        check(self.model, self._plan, self.quantizers)

    def compare(
        self,
        data: Iterable[Batch],
        *,
        forward: Forward | None = None,
        num_batches: int | None = None,
        progress: bool = True,
    ) -> list[SiteError]:
        """SQNR in dB and largest error in scale units at every site, against float, worst first."""
        return compare(
            self.model, self._plan, self.quantizers, data, forward=forward, num_batches=num_batches, progress=progress
        )

    def export(
        self, directory: str | os.PathLike[str], *, formats: Sequence[str] = ("encodings", "onnx"), force: bool = False
    ) -> None:
        """Writes the simulation for runtimes into a new directory, all formats or none; each file is read back.

        Args:
            directory: where the files will be: ``model.onnx``, ``encodings.json`` and AIMET's schemas beside it.
            formats: names from ``qtk.EXPORTERS``.
            force: replace an existing directory.

        Raises: CheckError if the simulation is not sound; ExportError if the directory exists, a format cannot hold
            the model, or a file read back differs from the simulation; nothing is written then.
        """
        export(self.simulation, self.example_inputs, directory, check=self.check, formats=formats, force=force)

    def verify_export(
        self, directory: str | os.PathLike[str], data: Iterable[Batch], *, forward: Forward | None = None
    ) -> ExportVerification:
        """Runs the exported files in their runtimes on ``data`` and compares them with the simulation; printable."""
        return verify_export(self.model, directory, data, forward=forward)

    def save(self, directory: str | os.PathLike[str], *, force: bool = False) -> None:
        """Writes parameters, encodings and plan (safetensors and JSON), to be read by ``QuantSim.load``.

        Raises: ExportError if the directory exists and ``force`` is not set, or cannot be written.
        """
        arguments = {
            "scheme": self.scheme,
            "weight_bits": self.weight_bits,
            "activation_bits": self.activation_bits,
            "config": self.config.model_dump(mode="json", exclude_none=True),
        }
        save(directory, state=whole_state(self.model), plan=self._plan, arguments=arguments, force=force)

    @classmethod
    def load(
        cls,
        directory: str | os.PathLike[str],
        model: nn.Module,
        example_inputs: ExampleInputs,
        *,
        in_place: bool = False,
    ) -> QuantSim:
        """The simulation that ``save`` wrote, made anew from the float ``model`` it belongs to.

        Args:
            directory: what ``save`` wrote.
            model: the float model, its parameters as they may be: the stored ones are loaded.
            example_inputs: as for the constructor.
            in_place: share the parameters of ``model``, and so overwrite them.

        Raises: EncodingError listing what does not fit, if it belongs to another model.
        """
        stored = load(directory)
        sim = cls(model, example_inputs, in_place=in_place, **stored.arguments)  # type: ignore[arg-type]
        sim._plan = restore(stored, sim.model, sim._plan)
        return sim
