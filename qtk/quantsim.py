"""``QuantSim``: the quantization simulation. Every method imports and calls one function of ``qtk.workflow``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, cast

from torch import Tensor, nn

from qtk.calibrators.scheme import calibrator, canonical_scheme
from qtk.calls.calls import Call
from qtk.calls.inputs import split_inputs
from qtk.calls.states import set_states, states_of
from qtk.capture.exclusion import exclude_paths
from qtk.capture.free_shapes import DynamicShapes
from qtk.capture.prepared_model import PreparedModel
from qtk.config.load import load_config
from qtk.config.schema import QuantConfig, check_op_names, check_schemes
from qtk.core.encoding import Encoding
from qtk.core.plan import QuantPlan
from qtk.core.settled import Settled
from qtk.core.width import FROM_CONFIG, Width, width_from_json, width_to_json
from qtk.data.forward_pass import Data, Forward
from qtk.data.sequences import Reset, Sequences
from qtk.data.valid_tokens import Valid
from qtk.graph.insert import insert
from qtk.graph.simulation import Simulation
from qtk.planning.planner import RULE_NAMES, plan
from qtk.planning.state_pairs import pair_states
from qtk.public import public
from qtk.quantizers.quantizer import Mode, Quantizer
from qtk.training.range_training import RangeTraining
from qtk.transforms.keep_batch_norms import as_folded, settle_batch_norms
from qtk.transforms.split_gates import split_gates
from qtk.workflow.analysis import Analysis
from qtk.workflow.encoding_changes import EncodingChanges
from qtk.workflow.prepare import ExampleInputs, prepare_own

if TYPE_CHECKING:
    from qtk.report.verdict import Verdict


@public
class QuantSim(Settled, RangeTraining, EncodingChanges, Analysis):
    """Simulates a quantized model exactly, and trains, measures, saves and exports it.

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
    0.weight  int4 per_channel(axis=0) symmetric  min_max  (weight of linear; defaults)
    1:out  uint8 per_tensor asymmetric  min_max  (relu; defaults)
    0.bias  float  (float by defaults)
    0:out  float  (inside supergroup linear → relu)

    A config decides site by site:

    >>> config = {"version": 1, "rules": [{"match": {"path": "0"}, "weight": {"dtype": "fp8_e4m3"}}]}
    >>> str(qtk.QuantSim(model, batches[0], config=config).quantizers["0.weight"].spec)
    'fp8_e4m3 per_tensor symmetric'

    Args:
        model: a float model, or one from ``prepare_model``.
        example_inputs: a tensor, tuple or dict the model runs on; its numbers do not matter.
        scheme: how ranges are found; a name from ``qtk.SCHEMES``, with settings if need be:
            ``percentile(quantile=0.999)``.
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
        self,
        model: nn.Module,
        example_inputs: ExampleInputs,
        *,
        scheme: str = "min_max",
        weight_bits: Width = FROM_CONFIG,
        activation_bits: Width = FROM_CONFIG,
        config: str | Path | Mapping[str, object] | QuantConfig = "default",
        in_place: bool = False,
        dynamic_shapes: DynamicShapes = "batch",
        variants: Sequence[ExampleInputs] = (),
        states: Mapping[str, int | str] = MappingProxyType({}),
    ) -> None:
        self.scheme, self.weight_bits, self.activation_bits = canonical_scheme(scheme), weight_bits, activation_bits
        self.config, self.example_inputs, self.dynamic_shapes = load_config(config), example_inputs, dynamic_shapes
        check_op_names(self.config, RULE_NAMES)
        check_schemes(self.config, calibrator)
        prepared = prepare_own(model, example_inputs, variants, in_place=in_place, dynamic_shapes=dynamic_shapes)
        exclude_paths(prepared, self.config.exclude)
        set_states(prepared, states)
        settle_batch_norms(prepared, Call(*split_inputs(example_inputs), None), self.config.fold_batch_norms)
        if self.config.split_gates:
            split_gates(prepared)
        decided = self._plan(prepared, self.config)
        self._simulation = Simulation(prepared, decided, insert(prepared, decided), target=self.config.target)
        for quantizer in self._simulation.quantizers.values():
            quantizer.mode = Mode.SIMULATE

    @property
    def simulation(self) -> Simulation:
        """Model, plan and quantizers as they are now; only qtk's own functions set them."""
        return self._simulation

    @simulation.setter
    def simulation(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def plan_of(self, prepared: PreparedModel) -> QuantPlan:
        """The plan that the settings give the model of this simulation, rewritten; rules are not checked again."""
        return self._plan(prepared, self.config.with_rules_optional())

    def _plan(self, prepared: PreparedModel, config: QuantConfig) -> QuantPlan:
        with as_folded(prepared) as gone:
            decided = plan(prepared, config, weight_bits=self.weight_bits, activation_bits=self.activation_bits,
                           scheme=self.scheme, gone=gone)
        return pair_states(decided, prepared)

    @property
    def model(self) -> PreparedModel:
        """The fake-quantized model: evaluate it, train it."""
        return cast(PreparedModel, self._simulation.model)

    @model.setter
    def model(self, model: PreparedModel) -> None:
        self._simulation = replace(self._simulation, model=model)

    @property
    def plan(self) -> QuantPlan:
        """Every site, how it is quantized and why, and what is left in float; printable."""
        return self._simulation.plan

    @property
    def quantizers(self) -> Mapping[str, Quantizer]:
        """Site name → its quantizer, in graph order; sites that share an encoding share the quantizer."""
        return MappingProxyType({site.name: quantizer for site, quantizer in self._simulation.quantizers.items()})

    def encodings(self) -> dict[str, Encoding]:
        """Site name → encoding, for every site that has one; sites that are quantized dynamically have none."""
        return {name: e for name, quantizer in self.quantizers.items() if (e := quantizer.encoding) is not None}

    def compute_encodings(
        self, data: Data | None, *, sites: Iterable[str] | str | None = None, only_missing: bool = False,
        forward: Forward | None = None, num_batches: int | None = None, progress: bool = True,
        valid: Valid | None = None, reset: Reset | None = None,
    ) -> None:
        """Computes every encoding that is not frozen: of weights from their values, of activations from ``data``.

        >>> import qtk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU()).eval()
        >>> batches = [torch.randn(16, 8) for _ in range(4)]
        >>> sim = qtk.QuantSim(model, batches[0])
        >>> sim.compute_encodings(batches, progress=False)
        >>> list(sim.encodings())
        ['input:input', '0.weight', '1:out']

        A loader of (image, label) pairs:

        >>> pairs = [(batch, 0) for batch in batches]
        >>> sim.compute_encodings(pairs, forward=lambda model, batch: model(batch[0]), progress=False)

        Some sites only, or those whose encoding is missing:

        >>> sim.compute_encodings(batches, sites="*:out", num_batches=2, progress=False)
        >>> sim.forget("0.weight")
        >>> sim.compute_encodings(batches, only_missing=True, progress=False)

        Under ``torchrun`` every rank passes its share of the data, and all get the same encodings.

        Args:
            data: batches, or a function that runs the model over its own; ``None`` if no activation is quantized
                statically. Of a model with ``states`` they are the steps of one sequence, or ``qtk.Sequences``.
            sites: names of the sites to calibrate, or globs over names; ``None``: all.
            only_missing: compute only encodings that are missing.
            forward: how to run the model on a batch, e.g. ``lambda model, batch: model(batch[0])``.
            num_batches: stop after so many.
            progress: show a bar.
            valid: which tokens count, where they can be followed: the name of an input (``"attention_mask"``), a
                list with the mask of each side of an encoder-decoder, or a function from a batch to bool [samples,
                tokens]; ``None``: all. A mapping from masks to the names of their inputs where names do not tell.
            reset: where a sequence begins, of a model with ``states`` or buffers that forward writes: short for
                ``qtk.Sequences(data, reset=reset)``.

        Raises: CalibrationError for NaN or +inf, naming the site, for missing data, or for a name of no site;
            CheckError, if ``sites`` is ``None``, as ``check``.
        """
        from qtk.calibration.calibrate import CalibrationData
        from qtk.workflow.compute_encodings import compute_encodings

        if reset is not None:
            data = Sequences(cast(Iterable[object], data), reset=reset)
        calibration_data = CalibrationData(data, self.example_inputs, forward, num_batches, progress, valid)
        compute_encodings(self, calibration_data, sites=sites, only_missing=only_missing)

    def check(self) -> None:
        """Checks that every planned quantizer is inserted, enabled, calibrated and finite.

        >>> import qtk, torch
        >>> sim = qtk.QuantSim(torch.nn.Linear(4, 2).eval(), torch.randn(8, 4))
        >>> sim.check()  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        qtk.errors.CheckError: ... findings:...

        Raises: CheckError listing every finding.
        """
        from qtk.workflow.check import check

        check(self._simulation)

    def export(
        self, directory: str | os.PathLike[str], *, formats: Iterable[str] | str = ("encodings", "onnx"),
        force: bool = False, opset: int | None = None, check: bool = True, output_names: Sequence[str] | None = None,
        state_codes: bool = False, tokenizer: object | None = None,
    ) -> None:
        """Writes the simulation for runtimes into a new directory, all formats or none; each file is read back.

        >>> import pathlib, qtk, tempfile, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU()).eval()
        >>> sim = qtk.QuantSim(model, torch.randn(16, 8))
        >>> sim.compute_encodings([torch.randn(16, 8)], progress=False)
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> sim.export(folder / "both")
        >>> (folder / "both" / "model.onnx").exists()
        True

        Encodings alone, which need no package onnx:

        >>> sim.export(folder / "encodings", formats=["encodings"])
        >>> sorted(path.name for path in (folder / "encodings").glob("*.json"))
        ['encodings.json', 'encodings_aimet_1.0.0.json', 'encodings_aimet_2.0.0.json']

        Args:
            directory: where the files will be: ``model.onnx``, ``model.pt2``, ``encodings.json`` and AIMET's schemas.
            formats: names, or one name, from ``qtk.EXPORTERS``.
            force: replace an existing directory.
            opset: ONNX operator set; ``None``: the lowest from 19 on that has the formats of all sites.
            check: run ONNX files on the example inputs, with ONNX Runtime's optimizations off and on, where it is
                installed, and warn of what departs from the simulation.
            output_names: names of the outputs in ``model.onnx``, in order; ``None``: those of the model's dict, or
                ``output_0``, ``output_1``, …. Names of axes are given with ``dynamic_shapes``.
            state_codes: take and return ``states`` in ``model.onnx`` as their integer codes, which a loop hands on as
                they are: of 8 bits a quarter of the bytes. Which output an input is next, and the encodings, stand in
                the file.
            tokenizer: its files are written beside those of ``compressed_tensors``, by its ``save_pretrained``.

        Raises: CheckError if the simulation is not sound; ExportError if the directory exists, a format cannot hold
            the model, the names are not one for each output, a state has no codes, or a file read back differs from the
            simulation; nothing is written then.
        """
        from qtk.workflow.export import export

        export(self.simulation, self.example_inputs, directory, check=self.check, formats=formats, force=force,
               opset=opset, run=check, output_names=output_names, state_codes=state_codes, tokenizer=tokenizer)

    def verify_export(
        self, directory: str | os.PathLike[str], data: Data, *, forward: Forward | None = None,
        runtime: str = "onnxruntime", float_export: str | os.PathLike[str] | None = None, turns: int = 30,
        progress: bool = True, valid: Valid | None = None, batch_size: int = 1, threads: int | None = None,
    ) -> Verdict:
        """Runs the exported files on ``data`` against the simulation; arguments as ``qtk.workflow.verify_export``.

        >>> import pathlib, qtk, tempfile, torch
        >>> sim, batches = qtk.QuantSim(torch.nn.Linear(4, 2).eval(), torch.randn(8, 4)), [torch.randn(8, 4)]
        >>> sim.compute_encodings(batches, progress=False)
        >>> folder = pathlib.Path(tempfile.mkdtemp()) / "exported"
        >>> sim.export(folder)
        >>> sim.verify_export(folder, batches, turns=0).exact.top1
        1.0
        """
        from qtk.workflow.verify_export import verify_export

        return verify_export(self.simulation, directory, data, forward=forward, runtime=runtime,
                             float_export=float_export, turns=turns, progress=progress, valid=valid,
                             batch_size=batch_size, threads=threads)

    def load_float_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Loads a float checkpoint of the original model; batch norms are folded again, and so on.

        >>> import qtk, torch
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8)).eval()
        >>> sim = qtk.QuantSim(model, torch.randn(2, 3, 8, 8))
        >>> sim.load_float_state_dict(model.state_dict())

        Encodings are forgotten: they belong to the weights that were there before.

        Raises: EncodingError listing every missing, unexpected or misshapen tensor; nothing has changed then.
        """
        from qtk.workflow.float_state import load_float_state

        load_float_state(self._simulation, state)

    def save(
        self, directory: str | os.PathLike[str], *, weights: Literal["float", "integer"] = "float", force: bool = False
    ) -> None:
        """Writes parameters, encodings and plan (safetensors and JSON), to be read by ``QuantSim.load``.

        >>> import pathlib, qtk, tempfile, torch
        >>> folder = pathlib.Path(tempfile.mkdtemp()) / "saved"
        >>> qtk.QuantSim(torch.nn.Linear(4, 2).eval(), torch.randn(8, 4)).save(folder)
        >>> sorted(path.name for path in folder.glob("[a-z]*"))
        ['model.safetensors', 'sim.json']

        ``weights="integer"`` stores quantized weights as codes, those of 4 bits in half a byte. What is loaded computes
        the same, bit for bit, but its weights are the dequantized ones: the float weights are lost for training.

        Raises: ExportError if the directory exists without ``force``, cannot be written, or no weight has codes.
        """
        from qtk.workflow.store import save

        arguments = {
            "scheme": self.scheme, "config": self.config.model_dump(mode="json", exclude_none=True),
            "weight_bits": width_to_json(self.weight_bits), "activation_bits": width_to_json(self.activation_bits),
            "dynamic_shapes": self.dynamic_shapes if isinstance(self.dynamic_shapes, str | None) else "batch",
            "states": states_of(self.model),
        }
        save(directory, self._simulation, arguments=arguments, weights=weights, force=force)

    @classmethod
    def load(
        cls, directory: str | os.PathLike[str], model: nn.Module, example_inputs: ExampleInputs, *,
        in_place: bool = False, variants: Sequence[ExampleInputs] = (),
    ) -> QuantSim:
        """Loads a simulation that ``save`` wrote, for the float ``model`` that it was made from.

        >>> import pathlib, qtk, tempfile, torch
        >>> x, folder = torch.randn(8, 4), pathlib.Path(tempfile.mkdtemp()) / "saved"
        >>> sim = qtk.QuantSim(torch.nn.Linear(4, 2).eval(), x)
        >>> sim.save(folder)
        >>> again = qtk.QuantSim.load(folder, torch.nn.Linear(4, 2).eval(), x)

        Args:
            directory: what ``save`` wrote.
            model: the float model, whose parameter values do not matter; prepared, if ``dynamic_shapes`` are explicit.
            example_inputs: as for the constructor.
            in_place: share the parameters of ``model``, and so overwrite them.
            variants: as for the constructor, in the same order.

        Raises: EncodingError listing what does not fit, if it belongs to another model.
        """
        from qtk.workflow.store import load, prepare_stored, restore

        stored, widths = load(directory), ("weight_bits", "activation_bits")
        arguments = {name: width_from_json(v) if name in widths else v for name, v in stored.arguments.items()}
        config = load_config(arguments.get("config", "default"))  # type: ignore[arg-type]
        arguments["config"], shapes = config.with_rules_optional(), arguments.pop("dynamic_shapes", "batch")
        prepared = prepare_stored(stored, model, example_inputs, in_place=in_place, variants=variants)
        sim = cls(prepared, example_inputs, in_place=True, **arguments)  # type: ignore[arg-type]
        vars(sim).update(config=config, dynamic_shapes=shapes, _simulation=restore(stored, sim._simulation))
        return sim
