"""A recipe: one file that names model, data, settings, evaluation and exports of a run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from qtk.calibrators.scheme import calibrator
from qtk.cli.model_source import PRETRAINED
from qtk.config.files import read_file
from qtk.config.load import load_config
from qtk.config.mistakes import UNION_TAGS, shown
from qtk.config.schema import QuantConfig, check_op_names, check_schemes
from qtk.config.tensor_setting import Bits
from qtk.config.validate import Names, validate
from qtk.core.width import FROM_CONFIG, FromConfig
from qtk.errors import ConfigError
from qtk.layerwise.methods import method
from qtk.planning.patterns import RULE_NAMES
from qtk.planning.rules import Rules
from qtk.public import public
from qtk.registry import nearest
from qtk.report.summary import FLOAT, SUMMARY_JSON, SUMMARY_TXT
from qtk.workflow.export import EXPORTERS
from qtk.workflow.transforms import transform

Name = Annotated[str, Field(pattern=r"^\w[\w.-]*$", max_length=80)]
"""A name that is used for folders and keys."""


def _known_word(value: object) -> object:
    if isinstance(value, str) and value != FromConfig.FROM_CONFIG.value:
        raise ValueError(f"got {shown(value)}; must be a number of bits, null for float, or from_config")
    return value


RecipeWidth = Annotated[
    Annotated[FromConfig, Tag(UNION_TAGS[0])] | Annotated[Bits | None, Tag(UNION_TAGS[1])],
    Discriminator(lambda value: UNION_TAGS[0] if isinstance(value, str | FromConfig) else UNION_TAGS[1]),
    BeforeValidator(_known_word),
]
"""A number of bits, ``null`` for float, or ``from_config``."""

Count = Annotated[int, Field(strict=True, ge=1)]

ONNX = "onnx"
TOP1 = "top1"


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelEntry(_Part):
    """A model.

    Args:
        name: its name in the results.
        model: ``timm:resnet18``, ``torchvision:mobilenet_v2``, ``demo:digits_cnn`` or ``module:callable``.
        weights: a .safetensors file, a .pth file with tensors only, or ``pretrained``.
        input_shape: batch included; left out, the model is captured on the first calibration batch.
        dynamic_shapes: sizes that may vary: ``batch``, or ``all`` for sequences of any length.
        exclude: globs over module paths that stay in float, in addition to ``exclude`` of the config.
    """

    name: Name
    model: str
    weights: str | None = None
    input_shape: Annotated[tuple[Count, ...], Field(min_length=1)] | None = None
    dynamic_shapes: Literal["batch", "all"] = "batch"
    exclude: Names = ()


class DataEntry(_Part):
    """``module:callable`` returning batches ``(inputs, label)``, called anew for each pass over them.

    Args:
        calibration: a few hundred representative samples; labels are not used.
        evaluation: data to evaluate on; only ``qtk export`` does without.
        num_batches: how many batches of the calibration data are taken; left out: all.
        valid: the input that says which tokens count (``attention_mask``) in calibration, errors and agreement, or a
            list of two, of an encoder-decoder; left out: all count.
        num_evaluation_batches: likewise of the evaluation data.
    """

    calibration: str
    evaluation: str | None = None
    num_batches: Count | None = None
    valid: str | list[str] | None = None
    num_evaluation_batches: Count | None = None


class Automatic(_Part):
    """``qtk.quantize``: what reaches ``max_drop`` is found by trials, judged by the evaluation data.

    Args:
        max_drop: by how much the metric may be below the float model's metric (perplexity and divergence: above it);
            for ``qtk export``, which evaluates nothing, the error of the outputs.
        time_limit: seconds for a model, after which no further trial begins.
    """

    max_drop: Annotated[float, Field(allow_inf_nan=False)] = 0.01
    time_limit: Annotated[float, Field(gt=0)] | None = None


class Setting(_Part):
    """A named choice of widths, with transforms before calibration and layer-wise methods after it.

    Args:
        name: its name in the results.
        weight_bits: width of weights; left out, the width in the config's defaults, else 8; ``null`` is float.
        activation_bits: width of activations likewise.
        scheme: how ranges are found, instead of the recipe's.
        config: instead of the recipe's.
        encodings: a file for ``sim.load_encodings``: what is in it stays as it is, all else is calibrated.
        transforms: ``fold_batch_norms``, ``equalize``, ``smooth_quant(alpha=0.5)``, in order, before calibration.
        layerwise: ``seq_mse``, ``gptq``, ``adaround``, ``coordinate_descent``, ``bias_correction``, after it, in one
            walk; ``reconstruction`` after these.
        auto: find scheme, transforms, layer-wise methods and sites to leave precise, in place of naming them.
    """

    name: Name
    weight_bits: RecipeWidth = FROM_CONFIG
    activation_bits: RecipeWidth = FROM_CONFIG
    scheme: str | None = None
    config: str | dict[str, object] | None = None
    encodings: str | None = None
    transforms: tuple[str, ...] = ()
    layerwise: tuple[str, ...] = ()
    auto: Automatic | None = None

    @model_validator(mode="after")
    def _has_no_named_steps_with_auto(self) -> Setting:
        named = [key for key in ("encodings", "transforms", "layerwise") if getattr(self, key)]
        if self.auto is not None and named:
            raise ValueError(f"auto and {' and '.join(named)} exclude each other; remove one")
        return self


class Recipe(_Part):
    """A whole run: every model in every setting.

    Args:
        models: the models to quantize.
        data: calibration and evaluation data.
        config: a shipped target, a file, or the configuration itself.
        scheme: how ranges are found.
        settings: widths to try, in the order of the results.
        evaluation: ``top1``; of language models ``perplexity``, or ``kl``, the divergence from the float model, with
            token ids as labels; or ``module:callable`` from pairs (output, label) to a number.
        exports: formats to write for each model and setting.
        report: write ``report.html`` for each model and setting, a page to look at.
        onnx_for: the settings that ``onnx`` is written for; all, if left out.
        output: directory of the results.
        seed: torch's random seed, set before each model is built.
    """

    models: Annotated[tuple[ModelEntry, ...], Field(min_length=1)]
    data: DataEntry
    config: str | dict[str, object] = "default"
    scheme: str = "min_max"
    settings: Annotated[tuple[Setting, ...], Field(min_length=1)]
    evaluation: str = TOP1
    exports: tuple[str, ...] = ("encodings", ONNX)
    onnx_for: tuple[str, ...] | None = None
    report: bool = True
    output: str = "qtk-output"
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0

    @model_validator(mode="after")
    def _names_agree(self) -> Recipe:
        models = [model.name for model in self.models]
        settings = [setting.name for setting in self.settings]
        for key, names in (("models", models), ("settings", settings)):
            duplicate = next((name for name in names if names.count(name) > 1), None)
            if duplicate is not None:
                raise ValueError(f"{key}: the name {duplicate!r} appears twice; results are told apart by it")
        for name in models:
            if name.lower() in (SUMMARY_JSON, SUMMARY_TXT):
                raise ValueError(f"models: {name!r} is a file of the results; choose another name")
        if FLOAT in settings:
            raise ValueError(f"settings: {FLOAT!r} is the model in float, always measured; choose another name")
        for name in self.onnx_for or ():
            if name not in settings:
                raise ValueError(f"onnx_for: no setting is called {name!r}; {nearest(name, settings)}")
        return self

    def scheme_of(self, setting: Setting) -> str:
        return setting.scheme or self.scheme

    def config_of(self, setting: Setting, model: ModelEntry | None = None) -> QuantConfig:
        """The checked configuration of a setting, with what ``model`` excludes. Raises: ConfigError."""
        config = load_config(self.config if setting.config is None else setting.config)
        return config if model is None else config.model_copy(update={"exclude": (*config.exclude, *model.exclude)})

    def formats_of(self, setting: Setting) -> tuple[str, ...]:
        """The export formats of a setting, by canonical name. Raises: ConfigError for an unknown one."""
        formats = dict.fromkeys(map(EXPORTERS.canonical, self.exports))
        if self.onnx_for is not None and setting.name not in self.onnx_for:
            formats.pop(ONNX, None)
        return tuple(formats)

    def check(self) -> None:
        """Checks schemes, methods, formats and configs before any model is built. Raises: ConfigError."""
        for setting in self.settings:
            calibrator(self.scheme_of(setting))
            for text in setting.transforms:
                transform(text)
            for text in setting.layerwise:
                method(text)
            self.formats_of(setting)
            if setting.encodings is not None and not Path(setting.encodings).is_file():
                raise ConfigError(f"settings: {setting.name}: encodings: {setting.encodings} does not exist; give the "
                                  "path of a file, from the recipe's folder or the working directory")
            config = self.config_of(setting)
            check_op_names(config, RULE_NAMES)
            check_schemes(config, calibrator)
            Rules(config, weight_bits=setting.weight_bits, activation_bits=setting.activation_bits)


@public
def load_recipe(path: str | os.PathLike[str]) -> Recipe:
    """Reads and checks a recipe; relative paths in it are resolved against its folder first.

    Raises: ConfigError with the file and the key path of each mistake.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"recipe {path} does not exist; give the path of a YAML file, or none for the digits")
    recipe = validate(Recipe, read_file(path), source=str(path))
    recipe = recipe.model_copy(update={
        "config": _beside(path, recipe.config),
        "models": tuple(
            model if model.weights in (None, PRETRAINED)
            else model.model_copy(update={"weights": _beside(path, model.weights)}) for model in recipe.models
        ),
        "settings": tuple(
            setting.model_copy(update={"config": _beside(path, setting.config),
                                       "encodings": _beside(path, setting.encodings)}) for setting in recipe.settings
        ),
    })
    try:
        recipe.check()
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return recipe


def _beside(recipe: Path, file: str | dict[str, object] | None) -> str | dict[str, object] | None:
    """The path in the recipe's folder if that file exists, else ``file`` unchanged."""
    if isinstance(file, str) and (found := recipe.parent / file).is_file():
        return str(found)
    return file
