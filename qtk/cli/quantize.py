"""Runs a recipe: measures and exports every model in float and in every setting, and measures the exported files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import numpy
import torch
from rich.console import Console
from torch import Tensor, nn

from qtk.auto.metric import Evaluate
from qtk.auto.quantize import quantize as search
from qtk.capture.prepared_model import PreparedGraph, PreparedModel
from qtk.cli.batches import Batches
from qtk.cli.console import shows_bars
from qtk.cli.evaluation import Counted, Evaluation, agreement, evaluation, outputs_sqnr_db
from qtk.cli.example_input import example_input
from qtk.cli.model_source import build_model
from qtk.cli.onnx_file import OnnxFile, nested_like
from qtk.cli.recipe import ONNX, Automatic, DataEntry, ModelEntry, Recipe, Setting
from qtk.cli.results import Results
from qtk.core.plan import QuantPlan
from qtk.data.forward_pass import Batch, outputs
from qtk.data.valid_tokens import ValidTokens
from qtk.errors import ConfigError, QtkError
from qtk.graph.simulation import Simulation
from qtk.public import public
from qtk.quantsim import QuantSim
from qtk.report.account import Account
from qtk.report.summary import FLOAT, Score, Summary
from qtk.runtimes.session import require_onnxruntime
from qtk.torch_private import pytree
from qtk.workflow.export import export as export_simulation
from qtk.workflow.exported_graphs import onnx_name
from qtk.workflow.layerwise import apply_layerwise
from qtk.workflow.prepare import ExampleInputs, prepare_model
from qtk.workflow.transforms import transform

REPORT, REPORT_BATCHES = "report.html", 4
"""The report of a model in a setting, and the calibration batches that it is measured on."""


@public
def quantize(recipe: Recipe, directory: str | os.PathLike[str], *, force: bool, console: Console) -> Summary:
    """Runs ``recipe`` and writes exports and summary into ``directory``, setting by setting, each whole or not at all.

    Args:
        recipe: what to run.
        directory: the output directory: ``<model>/<setting>/``, ``summary.json`` and ``summary.txt``.
        force: replace an existing directory.
        console: where progress is printed.

    Returns: the scores, and what failed.

    Raises: QtkError if every setting fails; the directory is then unchanged.
    """
    if recipe.data.evaluation is None:
        raise ConfigError("data.evaluation: missing; add module:callable, or run `qtk export`, which measures nothing")
    measure = evaluation(recipe.evaluation)
    if any(ONNX in recipe.formats_of(setting) for setting in recipe.settings):
        require_onnxruntime()
    held_out = Batches(recipe.data.evaluation, "data.evaluation", recipe.data.num_evaluation_batches)
    with Results(directory, force=force, metric=measure.name, measured_on=_measured_on(recipe.data)) as results:
        calibration = calibration_of(recipe)
        for entry in recipe.models:
            with _model_of(results, recipe, entry):
                RecipeRun(recipe, entry, calibration, console).measure(results, measure, held_out)
    return results.summary


@public
def export(recipe: Recipe, directory: str | os.PathLike[str], *, force: bool, console: Console) -> Summary:
    """Calibrates and exports every model in every setting, without measuring. Arguments and errors: ``quantize``."""
    if not any(recipe.formats_of(setting) for setting in recipe.settings):
        raise ConfigError("exports: is empty, so there is nothing to write; add encodings or onnx")
    with Results(directory, force=force, metric=None) as results:
        calibration = calibration_of(recipe)
        for entry in recipe.models:
            with _model_of(results, recipe, entry):
                run = RecipeRun(recipe, entry, calibration, console)
                for setting in recipe.settings:
                    with results.setting(entry.name, setting.name) as folder:
                        sim, account = run.calibrated(setting)
                        run.exported(sim, setting, folder)
                        run.report(sim, folder, setting, account, {})
    return results.summary


def _measured_on(data: DataEntry) -> str:
    """The data that accuracy and errors are of, in words."""
    seen = ", which calibration saw" if data.evaluation == data.calibration else ""
    return f"the evaluation data ({data.evaluation}{seen})"


def calibration_of(recipe: Recipe) -> Batches:
    """Raises: ConfigError if the batches may have no end."""
    batches = Batches(recipe.data.calibration, "data.calibration", recipe.data.num_batches, labelled=False)
    batches.require_end()
    return batches


@contextmanager
def _model_of(results: Results, recipe: Recipe, entry: ModelEntry) -> Iterator[None]:
    """Notes an error that concerns a whole model as the failure of all its settings."""
    try:
        yield
    except Exception as error:
        for setting in recipe.settings:
            results.fail(entry.name, setting.name, error)


@dataclass(frozen=True, slots=True)
class _Pass:
    """The outputs and labels of one pass over the data, batch by batch, and which elements count."""

    outputs: list[object]
    labels: list[object]
    counted: Counted | None = None


class RecipeRun:
    """One model of a recipe."""

    def __init__(self, recipe: Recipe, entry: ModelEntry, calibration: Batches, console: Console) -> None:
        self.recipe = recipe
        self.entry = entry
        self.console = console
        self.calibration = calibration
        self.progress = shows_bars(console)
        torch.manual_seed(recipe.seed)
        self.model = build_model(entry.model, weights=entry.weights, where=f"models.{entry.name}.model")
        self.example = self._example()
        with self._step("capturing"):
            self.prepared = prepare_model(self.model, self.example, dynamic_shapes=entry.dynamic_shapes)

    def measure(self, results: Results, measure: Evaluation, held_out: Batches) -> None:
        """Adds the scores and exports in float and in every setting to ``results``."""
        reference = self._pass(self.model, held_out, FLOAT)
        value = measure(reference.outputs, reference.labels)
        with results.setting(self.entry.name, FLOAT) as folder:
            results.add(self.entry.name, FLOAT, Score(value, None))
            self._export_float(folder)
            results.add(self.entry.name, FLOAT, Score(value, None, _onnx_size_bytes(folder)))
        for setting in self.recipe.settings:
            with results.setting(self.entry.name, setting.name) as folder:
                score = self._score(setting, folder, reference, measure, held_out)
                results.add(self.entry.name, setting.name, score)

    def _score(
        self, setting: Setting, folder: Path, reference: _Pass, measure: Evaluation, held_out: Batches
    ) -> Score:
        def metric(model: nn.Module) -> float:
            value = measure(self._pass(model, held_out, setting.name, like=reference).outputs, reference.labels,
                            reference.outputs)
            return value if measure.higher_is_better else -value

        metric.__name__ = measure.name
        sim, account = self.calibrated(setting, metric)
        self.exported(sim, setting, folder)
        simulated = self._pass(sim.model, held_out, setting.name, like=reference)
        score = Score(
            measure(simulated.outputs, reference.labels, reference.outputs),
            outputs_sqnr_db(reference.outputs, simulated.outputs, simulated.counted),
            _onnx_size_bytes(folder),
        )
        in_float = measure(reference.outputs, reference.labels)
        self.report(sim, folder, setting, account,
                    {f"{measure.name} on the evaluation data, {in_float:.4g} in float": f"{score.value:.4g}"})
        file = folder / onnx_name("")
        if not isinstance(sim.model, PreparedGraph) or not file.is_file():
            return score
        runner = OnnxFile(file, sim.model)
        run = self._pass(runner, held_out, f"{setting.name} in ONNX Runtime", like=reference)
        exported = [nested_like(*pair) for pair in zip(simulated.outputs, run.outputs, strict=True)]
        return replace(
            score,
            onnxruntime_value=measure(exported, reference.labels, reference.outputs),
            onnxruntime_agreement=agreement(simulated.outputs, exported, simulated.counted),
            runtime=runner.runtime,
        )

    def calibrated(self, setting: Setting, metric: Evaluate | None = None) -> tuple[QuantSim, Account | None]:
        """The calibrated simulation of a setting, after its transforms and layer-wise methods, or the helpful ones.

        With ``auto``, the account of what was tried too.
        """
        if setting.auto is not None:
            return self._found(setting, setting.auto, metric)
        sim = QuantSim(
            self.prepared,
            self.example,
            scheme=self.recipe.scheme_of(setting),
            weight_bits=setting.weight_bits,
            activation_bits=setting.activation_bits,
            config=self.recipe.config_of(setting, self.entry),
        )
        valid, progress = self.recipe.data.valid, self.progress
        for text in setting.transforms:
            pairs, count = self.calibration.open()
            result = transform(text).apply(
                sim, (inputs for inputs, _ in pairs), num_batches=count, progress=progress, valid=valid
            )
            self._say(f"{setting.name}: {result.summary}")
        if setting.encodings is not None:
            self._say(f"{setting.name}: {sim.load_encodings(setting.encodings, partial=True)}")
        self._say(f"calibrating {setting.name}")
        pairs, count = self.calibration.open()
        sim.compute_encodings((inputs for inputs, _ in pairs), num_batches=count, valid=valid, progress=progress)
        if setting.layerwise:
            self._say(f"improving {setting.name} by {', '.join(setting.layerwise)}")
            pairs, count = self.calibration.open()
            batches = (inputs for inputs, _ in pairs)
            apply_layerwise(sim, batches, setting.layerwise, num_batches=count, valid=valid, progress=progress)
        return sim, None

    def _found(self, setting: Setting, auto: Automatic, metric: Evaluate | None) -> tuple[QuantSim, Account]:
        self._say(f"trying what helps {setting.name}")
        pairs, count = self.calibration.open()
        found = search(
            self.prepared, (inputs for inputs, _ in pairs), target=self.recipe.config_of(setting, self.entry),
            evaluate=metric, max_drop=auto.max_drop, time_limit=auto.time_limit, example_inputs=self.example,
            weight_bits=setting.weight_bits, activation_bits=setting.activation_bits, num_batches=count,
            scheme=self.recipe.scheme_of(setting), valid=self.recipe.data.valid, progress=self.progress,
        )
        self.console.print(found.account.table().rich())
        self._say(f"{setting.name}: {found.account.end}")
        return found

    def report(self, sim: QuantSim, folder: Path, setting: Setting, account: Account | None,
               headline: Mapping[str, str]) -> None:
        """Writes ``report.html`` over some calibration batches, if the recipe has it and jinja2 is installed."""
        if self.recipe.report and find_spec("jinja2") is not None:
            pairs, count = self.calibration.open()
            try:
                sim.report(folder / REPORT, (inputs for inputs, _ in pairs), title=f"{self.entry.name} {setting.name}",
                           num_batches=REPORT_BATCHES if count is None else min(count, REPORT_BATCHES), account=account,
                           headline=headline, progress=False, valid=self.recipe.data.valid,
                           data_name=f"the calibration data ({self.calibration.locator})")
            except QtkError as error:
                self._say(f"{setting.name}: no {REPORT}: {error}")

    def exported(self, sim: QuantSim, setting: Setting, folder: Path) -> None:
        """Writes the formats of a setting, if it has any."""
        formats = self.recipe.formats_of(setting)
        if formats:
            self._say(f"exporting {setting.name} as {' and '.join(formats)}")
            sim.export(folder, formats=formats, progress=self.progress)

    def _export_float(self, folder: Path) -> None:
        """Writes the float model as ONNX if any setting writes ONNX, so that sizes can be compared."""
        if any(ONNX in self.recipe.formats_of(setting) for setting in self.recipe.settings):
            self._say(f"exporting {FLOAT} as {ONNX}")
            in_float = Simulation(self.prepared, QuantPlan({}), {})
            export_simulation(in_float, self.example, folder, formats=(ONNX,), progress=self.progress)

    def _example(self) -> ExampleInputs:
        if self.entry.input_shape:
            return example_input(self.entry.input_shape, torch.float32)
        pairs, _ = self.calibration.open()
        inputs, _ = next(pairs)
        if not isinstance(inputs, (Tensor, tuple, dict)):
            raise ConfigError(f"data.calibration: inputs of type {type(inputs).__name__}; "
                              "must be a tensor, a tuple of arguments or a dict of named ones")
        return inputs

    def _pass(self, model: nn.Module, held_out: Batches, what: str, *, like: _Pass | None = None) -> _Pass:
        """Runs the model on all batches; outputs on the CPU. Raises: ConfigError if labels differ from ``like``."""
        pairs, count = held_out.open()
        labels: list[object] = []

        def inputs() -> Iterator[Batch]:
            for batch, label in pairs:
                labels.append(label)
                yield batch

        title = f"{self.entry.name}: measuring {what}"
        count = count if like is None else len(like.labels)
        tokens = ValidTokens(model, self.recipe.data.valid if isinstance(model, PreparedModel) else None)
        made: list[object] = []
        counted: list[list[Tensor | None]] = []
        with tokens.listening():
            for output in outputs(model, inputs(), num_batches=count, label=title, progress=self.progress):
                leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
                which = [tokens.counted_of_output(leaf) for leaf in leaves]
                counted.append([None if each is None else each.cpu() for each in which])
                made.append(pytree.tree_map_only(Tensor, Tensor.cpu, output))
        result = _Pass(made, labels, None if tokens.valid is None else counted)
        if like is not None and not _equal(result.labels, like.labels):
            raise ConfigError(f"{held_out.where}: {held_out.locator} gives other batches on each pass; "
                              "turn shuffling and random augmentation off")
        return result

    def _say(self, what: str) -> None:
        self.console.print(f"{self.entry.name}: {what}", markup=False, highlight=False)

    @contextmanager
    def _step(self, what: str) -> Iterator[None]:
        """Prints a line, and on a terminal shows a spinner while the block runs."""
        self._say(what)
        with self.console.status(""):
            yield


def _equal(labels: Sequence[object], others: Sequence[object]) -> bool:
    return len(labels) == len(others) and all(
        torch.equal(label, other) if isinstance(label, Tensor) and isinstance(other, Tensor)
        else bool(numpy.all(label == other))
        for label, other in zip(labels, others, strict=True)
    )


def _onnx_size_bytes(folder: Path) -> int | None:
    """Size of all ONNX files in a folder, external data included; ``None`` if there are none."""
    return sum(path.stat().st_size for path in folder.glob("*.onnx*")) or None
