"""``QuantSim``: the quantization simulation. Every method imports and calls one function."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, cast

from torch import Tensor, nn

from qtk.calibrators.scheme import canonical_scheme
from qtk.capture.free_shapes import DynamicShapes
from qtk.capture.prepared_model import PreparedModel
from qtk.config.load import load_config
from qtk.config.schema import QuantConfig
from qtk.core.encoding import Encoding
from qtk.core.plan import QuantPlan
from qtk.core.width import FROM_CONFIG, Width
from qtk.data.forward_pass import Batch, Data, Forward
from qtk.data.labels import without_labels
from qtk.data.sequences import Reset, Sequences
from qtk.data.valid_tokens import Valid
from qtk.graph.simulation import Simulation
from qtk.public import RejectsUnknownAttributes, public
from qtk.quantizers.quantizer import Quantizer
from qtk.report.account import Account
from qtk.report.data_report import DataReport
from qtk.workflow.prepare import ExampleInputs, prepare_model

if TYPE_CHECKING:
    from qtk.report.drift import Drift
    from qtk.report.sensitivities import Sensitivities
    from qtk.report.site_errors import SiteErrors
    from qtk.report.verdict import Verdict
    from qtk.workflow.load_encodings import LoadedEncodings


@public
class QuantSim(RejectsUnknownAttributes):
    """Simulates a quantized model exactly, and trains, measures, saves and exports it.

    Every method calls one function of ``qtk.workflow``, ``qtk.analysis`` or ``qtk.training``, whose docstring has the
    arguments, errors and examples in full.

    >>> import qtk, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU()).eval()
    >>> batches = [torch.randn(16, 8) for _ in range(4)]
    >>> sim = qtk.QuantSim(model, batches[0])
    >>> sim.compute_encodings(batches, progress=False)
    >>> sim.model(batches[0]).shape
    torch.Size([16, 4])

    The plan says what is quantized, how and why, before any data is seen:

    >>> print(qtk.QuantSim(model, batches[0], weight_bits=4).plan)
    input:input  uint8 per_tensor asymmetric  min_max  (model input; defaults)
    0.weight  int4 per_channel(axis=0) symmetric  weight_mse  (weight of linear; defaults)
    1:out  uint8 per_tensor asymmetric  min_max  (relu; defaults)
    0.bias  float  (float by defaults)
    0:out  float  (inside supergroup linear → relu)

    Args:
        model: a float model, or one from ``prepare_model``.
        example_inputs: a tensor, tuple or dict the model runs on, labels left out; its numbers do not matter.
        scheme: how ranges are found; a name from ``qtk.SCHEMES``, with settings if need be:
            ``percentile(quantile=0.999)``. Symmetric weights of at most 4 bits take ``weight_mse`` for ``min_max``.
        weight_bits: width of weights; left out, the config's defaults say it, else 8. ``None`` leaves all of them in
            float, whatever the config says; a rule that asks for a width all the same must be optional.
        activation_bits: width of activations likewise; ``None`` for a weight-only simulation.
        config: a shipped target's name, a path to YAML or AIMET JSON, or the parsed mapping.
        in_place: share the parameters of ``model`` instead of copying them.
        dynamic_shapes: the sizes that may vary, as for ``prepare_model``: ``"all"`` for sequences of any length.
        variants: examples of other kinds of calls, with labels, without a mask, as for ``prepare_model``.
        states: inputs that are outputs of the call before: ``{"h": 1, "c": 2}``, by index or name of the output;
            ``{"past": 1}`` of a nested input, as of keys and values, whose tensors may grow along free axes. An input
            and its output share one encoding, and batches in order are the steps of a sequence.

    Raises: CaptureError if the model does not run or cannot be captured; ConfigError, SpecError for unfit settings.
    """

    example_inputs: ExampleInputs

    def __init__(
        self, model: nn.Module, example_inputs: ExampleInputs, *, scheme: str = "min_max",
        weight_bits: Width = FROM_CONFIG, activation_bits: Width = FROM_CONFIG,
        config: str | Path | Mapping[str, object] | QuantConfig = "default", in_place: bool = False,
        dynamic_shapes: DynamicShapes = "batch", variants: Sequence[ExampleInputs] = (),
        states: Mapping[str, int | str] = MappingProxyType({}),
    ) -> None:
        from qtk.workflow.simulate import simulate

        self.scheme, self.weight_bits, self.activation_bits = canonical_scheme(scheme), weight_bits, activation_bits
        self.config, self.dynamic_shapes = load_config(config), dynamic_shapes
        self.example_inputs = cast(ExampleInputs, without_labels(model, example_inputs))
        self._simulation = simulate(self, model, in_place=in_place, variants=variants, states=states)

    @classmethod
    def from_checkpoint(
        cls, folder: str | os.PathLike[str], example_inputs: ExampleInputs, *,
        model: Callable[[], nn.Module] | None = None, scheme: str = "min_max", weight_bits: Width = FROM_CONFIG,
        activation_bits: Width = FROM_CONFIG, config: str | Path | Mapping[str, object] | QuantConfig = "default",
        dynamic_shapes: DynamicShapes = "batch", verify: bool = True,
    ) -> QuantSim:
        """Simulates a folder of safetensors, whose weights stay in its files: ``qtk.workflow.model_folder``."""
        from qtk.workflow.model_folder import model_of_folder

        prepared = prepare_model(model_of_folder(Path(folder), model), example_inputs, dynamic_shapes=dynamic_shapes,
                                 verify=verify)
        sim = cls(prepared, example_inputs, scheme=scheme, weight_bits=weight_bits, activation_bits=activation_bits,
                  config=config, in_place=True)
        vars(sim).update(dynamic_shapes=dynamic_shapes)
        return sim

    @property
    def simulation(self) -> Simulation:
        """Holds model, plan and quantizers as they are now; only qtk's own functions set them."""
        return self._simulation

    @simulation.setter
    def simulation(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def plan_of(self, prepared: PreparedModel) -> QuantPlan:
        """Plans the model of this simulation, rewritten, by its settings; rules are not checked again."""
        from qtk.workflow.simulate import plan_by

        return plan_by(self, prepared, self.config.with_rules_optional())

    @property
    def model(self) -> PreparedModel:
        """Returns the fake-quantized model: evaluate it, train it."""
        return cast(PreparedModel, self._simulation.model)

    @model.setter
    def model(self, model: PreparedModel) -> None:
        self._simulation = replace(self._simulation, model=model)

    @property
    def plan(self) -> QuantPlan:
        """Returns every site, how it is quantized and why, and what stays in float; printable."""
        return self._simulation.plan

    @property
    def quantizers(self) -> Mapping[str, Quantizer]:
        """Maps site names to quantizers, in graph order; sites that share an encoding share the quantizer."""
        return MappingProxyType({site.name: quantizer for site, quantizer in self._simulation.quantizers.items()})

    def encodings(self) -> dict[str, Encoding]:
        """Maps site names to encodings; sites that are quantized dynamically have none."""
        return {name: e for name, quantizer in self.quantizers.items() if (e := quantizer.encoding) is not None}

    def compute_encodings(
        self, data: Data | None, *, sites: Iterable[str] | str | None = None, only_missing: bool = False,
        forward: Forward | None = None, num_batches: int | None = None, progress: bool = True,
        valid: Valid | None = None, reset: Reset | None = None,
    ) -> None:
        """Computes every encoding that is not frozen, of weights and from data: ``qtk.workflow.compute_encodings``.

        >>> import qtk, torch
        >>> sim = qtk.QuantSim(torch.nn.Linear(4, 2).eval(), torch.randn(8, 4))
        >>> sim.compute_encodings([torch.randn(8, 4)], progress=False)
        >>> list(sim.encodings())
        ['input:input', 'weight', 'linear:out']

        Args:
            data: batches, or a function that runs the model over its own; ``None`` if no activation needs any.
            sites: names of the sites to calibrate, or globs over names; ``None``: all.
            only_missing: compute only encodings that are missing.
            forward: how to run the model on a batch, e.g. ``lambda model, batch: model(batch[0])``.
            num_batches: stop after so many.
            progress: show a bar.
            valid: which tokens count, e.g. by an input, ``"attention_mask"``; ``None``: all.
            reset: where a sequence begins, of a model with states: short for ``qtk.Sequences(data, reset=reset)``.
        """
        from qtk.calibration.calibrate import CalibrationData
        from qtk.workflow.compute_encodings import compute_encodings

        if reset is not None:
            data = Sequences(cast(Iterable[object], data), reset=reset)
        calibration_data = CalibrationData(data, self.example_inputs, forward, num_batches, progress, valid)
        compute_encodings(self, calibration_data, sites=sites, only_missing=only_missing)

    def check(self) -> None:
        """Checks that every planned quantizer is inserted, enabled, calibrated and finite: ``qtk.workflow.check``."""
        from qtk.workflow.check import check

        check(self._simulation)

    def set_range(self, sites: str, low: float, high: float) -> None:
        """Sets the range of a site, or of all that match a glob, and freezes it: ``qtk.workflow.ranges``."""
        from qtk.workflow.ranges import set_range

        set_range(self.simulation, sites, low, high)

    def freeze(self, sites: Iterable[str] | str | None = None) -> None:
        """Fixes the encodings of sites, or of all, learned ones too, until ``unfreeze``: ``qtk.workflow.ranges``.

        >>> import qtk, torch
        >>> sim = qtk.QuantSim(torch.nn.Linear(4, 2).eval(), torch.randn(8, 4))
        >>> sim.freeze()
        >>> sim.unfreeze("input:input")
        >>> [name for name, quantizer in sim.quantizers.items() if quantizer.frozen]
        ['weight', 'linear:out']
        """
        from qtk.workflow.ranges import freeze

        freeze(self.simulation, sites, frozen=True)

    def unfreeze(self, sites: Iterable[str] | str | None = None) -> None:
        """Unfreezes what ``freeze``, ``set_range`` or a layer-wise method froze."""
        from qtk.workflow.ranges import freeze

        freeze(self.simulation, sites, frozen=False)

    def forget(self, sites: Iterable[str] | str | None = None) -> None:
        """Deletes encodings; ``compute_encodings(data, only_missing=True)`` makes others: ``qtk.workflow.ranges``."""
        from qtk.workflow.ranges import forget

        forget(self.simulation, sites)

    def load_encodings(
        self, source: str | os.PathLike[str] | Mapping[str, object], *, strict: bool = True, partial: bool = False,
        freeze: bool = True,
    ) -> LoadedEncodings:
        """Loads a file of ``sim.export`` or AIMET, or encodings, all or nothing: ``qtk.workflow.load_encodings``."""
        from qtk.workflow.load_encodings import load_encodings

        return load_encodings(self, source, strict=strict, partial=partial, freeze=freeze)

    def learn_ranges(
        self, sites: Iterable[str] | str = "*", *, gradient_scale: Literal["lsq"] | None = "lsq"
    ) -> list[str]:
        """Makes ranges trainable, to be trained with the weights: ``qtk.training.learned_ranges``."""
        from qtk.training.learned_ranges import learn_ranges

        return learn_ranges(self.simulation, sites, gradient_scale)

    def fix_ranges(self, sites: Iterable[str] | str = "*") -> list[str]:
        """Fixes learned ranges, zero points rounded to codes; returns the sites that were learned."""
        from qtk.training.learned_ranges import fix_ranges

        return fix_ranges(self.simulation, sites)

    def range_parameters(self) -> list[nn.Parameter]:
        """Returns the parameters of the learned ranges, for an optimizer's group without weight decay."""
        from qtk.training.learned_ranges import range_parameters

        return range_parameters(self.simulation)

    def weight_parameters(self) -> list[nn.Parameter]:
        """Returns the parameters of the model without the parameters of learned ranges."""
        from qtk.training.learned_ranges import weight_parameters

        return weight_parameters(self.simulation)

    def track_weights(self, sites: Iterable[str] | str = "*.weight") -> list[str]:
        """Makes ranges of weights follow the weights while the model trains: ``qtk.training.learned_ranges``."""
        from qtk.training.learned_ranges import track_weights

        return track_weights(self.simulation, sites)

    def compare(
        self, data: Iterable[Batch], *, forward: Forward | None = None, num_batches: int | None = None,
        progress: bool = True, valid: Valid | None = None,
    ) -> SiteErrors:
        """Measures own and accumulated error and share clipped at every site: ``qtk.analysis.compare``.

        >>> import qtk, torch
        >>> sim, batches = qtk.QuantSim(torch.nn.Linear(4, 2).eval(), torch.randn(8, 4)), [torch.randn(8, 4)]
        >>> sim.compute_encodings(batches, progress=False)
        >>> sim.set_range("input:input", low=-0.1, high=0.1)
        >>> sim.compare(batches, progress=False)[0].site
        'input:input'
        """
        from qtk.analysis.compare import compare

        return compare(self.simulation, data, forward=forward, num_batches=num_batches, progress=progress, valid=valid)

    def sensitivity(
        self, data: Iterable[Batch], *, loss: Callable[[object, Batch], Tensor | float] | None = None, top: int = 10,
        groups: Iterable[str] | str | None = None, forward: Forward | None = None, num_batches: int | None = None,
        progress: bool = True, valid: Valid | None = None,
    ) -> Sensitivities:
        """Estimates how much each site alone costs, and measures the ``top`` worst: ``qtk.analysis.sensitivity``."""
        from qtk.analysis.sensitivity import sensitivity

        return sensitivity(self.simulation, data, loss=loss, top=top, groups=groups, forward=forward,
                           num_batches=num_batches, progress=progress, valid=valid)

    def drift(
        self, data: Iterable[Batch], *, steps: int | None = None, forward: Forward | None = None, progress: bool = True,
    ) -> Drift:
        """Measures how far a model with states leaves float along a sequence: ``qtk.analysis.drift``."""
        from qtk.analysis.drift import drift

        return drift(self.simulation, data, steps=steps, forward=forward, progress=progress)

    def data_report(
        self, data: Iterable[Batch], *, forward: Forward | None = None, num_batches: int | None = None,
        progress: bool = True, valid: Valid | None = None,
    ) -> DataReport:
        """Reports whether calibration data are enough, and which batches stand out: ``qtk.workflow.data_report``."""
        from qtk.workflow.data_report import data_report

        return data_report(self, data, forward=forward, num_batches=num_batches, progress=progress, valid=valid)

    def report(
        self, path: str | os.PathLike[str], data: Iterable[Batch], *, title: str = "Quantized model",
        forward: Forward | None = None, num_batches: int | None = None, sensitivity: bool = True,
        account: Account | None = None, headline: Mapping[str, str] | None = None, force: bool = False,
        progress: bool = True, valid: Valid | None = None, data_name: str = "the data given",
        data_report: DataReport | None = None,
    ) -> None:
        """Writes a page of HTML: errors and ranges of the sites, their costs, and the plan: ``qtk.workflow.report``."""
        from qtk.workflow.report import report

        report(self.simulation, path, data, title=title, forward=forward, num_batches=num_batches,
               sensitivity=sensitivity, account=account, headline=headline, force=force, progress=progress,
               valid=valid, data_name=data_name, data_report=data_report)

    def export(
        self, directory: str | os.PathLike[str], *, formats: Iterable[str] | str = ("encodings", "onnx"),
        force: bool = False, opset: int | None = None, check: bool = True, output_names: Sequence[str] | None = None,
        state_codes: bool = False, tokenizer: object | None = None, io_codes: bool = False,
        progress: bool = True,
    ) -> None:
        """Writes the simulation for runtimes into a new directory, all formats or none: ``qtk.workflow.export``."""
        from qtk.workflow.export import OnnxOptions, export

        onnx = OnnxOptions(opset, check, output_names, state_codes)
        export(self.simulation, self.example_inputs, directory, formats=formats, force=force, onnx=onnx,
               tokenizer=tokenizer, io_codes=io_codes, progress=progress)

    def verify_export(
        self, directory: str | os.PathLike[str], data: Data, *, forward: Forward | None = None,
        runtime: str = "onnxruntime", float_export: str | os.PathLike[str] | None = None, turns: int = 30,
        progress: bool = True, valid: Valid | None = None, batch_size: int = 1, threads: int | None = None,
    ) -> Verdict:
        """Runs the exported files on ``data`` against the simulation: ``qtk.workflow.verify_export``."""
        from qtk.workflow.verify_export import verify_export

        return verify_export(self.simulation, directory, data, forward=forward, runtime=runtime,
                             float_export=float_export, turns=turns, progress=progress, valid=valid,
                             batch_size=batch_size, threads=threads)

    def load_float_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Loads a float checkpoint of the original model, and forgets encodings: ``qtk.transforms.float_state``."""
        from qtk.transforms.float_state import load_float_state

        load_float_state(self._simulation, state)

    def to_original(self) -> nn.Module:
        """Returns the simulation in the user's own class, with ``generate``: ``qtk.workflow.original_class``."""
        from qtk.workflow.original_class import to_original

        return to_original(self._simulation)

    def save(
        self, directory: str | os.PathLike[str], *, weights: Literal["float", "integer"] = "float", force: bool = False
    ) -> None:
        """Writes parameters, encodings and plan, to be read by ``QuantSim.load``: ``qtk.workflow.store``.

        >>> import pathlib, qtk, tempfile, torch
        >>> x, folder = torch.randn(8, 4), pathlib.Path(tempfile.mkdtemp()) / "saved"
        >>> qtk.QuantSim(torch.nn.Linear(4, 2).eval(), x).save(folder)
        >>> sim = qtk.QuantSim.load(folder, torch.nn.Linear(4, 2).eval(), x)
        """
        from qtk.workflow.simulate import settings_to_json
        from qtk.workflow.store import save

        save(directory, self._simulation, arguments=settings_to_json(self, self.model), weights=weights, force=force)

    @classmethod
    def load(
        cls, directory: str | os.PathLike[str], model: nn.Module, example_inputs: ExampleInputs, *,
        in_place: bool = False, variants: Sequence[ExampleInputs] = (),
    ) -> QuantSim:
        """Loads what ``save`` wrote, for the float ``model`` that it was made from, whose values do not matter.

        ``in_place`` shares the parameters of ``model``, and so overwrites them.

        Raises: EncodingError listing what does not fit, if it belongs to another model.
        """
        from qtk.workflow.simulate import settings_from_json
        from qtk.workflow.store import load, prepare_stored, restore

        stored = load(directory)
        settings = settings_from_json(stored.arguments)
        config, shapes = settings["config"], settings.pop("dynamic_shapes")
        settings["config"] = config.with_rules_optional()
        prepared = prepare_stored(stored, model, example_inputs, in_place=in_place, variants=variants)
        sim = cls(prepared, example_inputs, in_place=True, **settings)
        vars(sim).update(config=config, dynamic_shapes=shapes, _simulation=restore(stored, sim._simulation))
        return sim
