"""The model a recipe or a command names: from timm, torchvision, the demo, a folder, or the user's own code."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from qtk.cli.imported import load_callable
from qtk.errors import ConfigError, first_line
from qtk.registry import closest, nearest
from qtk.workflow.model_folder import model_of_folder

PRETRAINED = "pretrained"
"""The value of ``weights`` that asks for the weights the library downloads."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A library of models.

    Args:
        build: (name, whether pretrained, the key for messages) → the model.
        input_shape: (name, model) → the input shape with batch size 1; ``None`` if unknown.
        names: () → the names of the models. Raises: ImportError if the library is not installed.
    """

    build: Callable[[str, bool, str], nn.Module]
    input_shape: Callable[[str, nn.Module], Shape | None]
    names: Callable[[], Collection[str]]


def build_model(spec: str, *, weights: str | None = None, where: str = "model") -> nn.Module:
    """The model called ``spec``, with its weights, in eval mode.

    Args:
        spec: ``timm:resnet18``, ``torchvision:mobilenet_v2``, ``demo:digits_cnn``, ``hf:FOLDER`` or
            ``module:callable``.
        weights: a safetensors file, or a ``torch.save`` file with tensors only; ``pretrained``: downloaded by timm or
            torchvision. The demo models are always trained, and a folder has its own weights.
        where: the key in the recipe, for messages.

    Raises: ConfigError for an unknown model, a missing package, weights that cannot be read or do not fit.
    """
    prefix, _, name = spec.partition(":")
    pretrained = weights == PRETRAINED
    if prefix in SOURCES:
        model = SOURCES[prefix].build(name, pretrained, where)
    else:
        if ":" not in spec:
            raise ConfigError(f"{where}: {spec!r} does not say where the model is from; {_way_out(spec)}")
        if pretrained:
            raise ConfigError(f"{where}: weights: {PRETRAINED} is for timm: and torchvision:; give a file for {spec}")
        built = load_callable(spec, where=where)
        if not isinstance(built, nn.Module):
            raise ConfigError(f"{where}: {spec}() returned a {type(built).__name__}; it must return an nn.Module")
        model = built
    if weights is not None and not pretrained:
        load_weights(model, Path(weights))
    return model.eval()


def _way_out(name: str) -> str:
    """Returns what to write in place of a name alone; nothing is built."""
    known = {library: _names(library) for library in SOURCES}
    if found := [f"{library}:{name}" for library, names in known.items() if name.partition(".")[0] in names]:
        return f"write {' or '.join(found)}"
    close = closest(name, sorted({each for names in known.values() for each in names}))
    meant = [f"{library}:{each}" for each in close for library, names in known.items() if each in names]
    asked = f"; did you mean {' or '.join(meant)}?" if meant else ""
    return f"write {', '.join(f'{library}:…' for library in SOURCES)} or module:callable{asked}"


def _names(library: str) -> Collection[str]:
    """The models of a library; none if it is not installed."""
    try:
        return SOURCES[library].names()
    except ImportError:
        return ()


def usual_input_shape(spec: str, model: nn.Module) -> Shape | None:
    """The input shape of a library's model, with batch size 1; ``None`` if unknown or a user's model."""
    prefix, _, name = spec.partition(":")
    return SOURCES[prefix].input_shape(name, model) if prefix in SOURCES else None


def load_weights(model: nn.Module, path: Path) -> None:
    """Loads a file of weights strictly into ``model``. Never unpickles anything but tensors.

    Raises: ConfigError if it cannot be read, or listing the keys that are missing, unexpected or of another shape.
    """
    state = _read_state(path)
    expected = model.state_dict()
    findings = [f"missing: {name}" for name in expected if name not in state]
    findings += [f"unexpected: {name}" for name in state if name not in expected]
    findings += [
        f"{name}: shape {tuple(state[name].shape)} in the file, {tuple(expected[name].shape)} in the model"
        for name in expected if name in state and state[name].shape != expected[name].shape
    ]
    if findings:
        shown = "\n  ".join(findings[:SHOWN]) + (f"\n  … {len(findings) - SHOWN} more" if findings[SHOWN:] else "")
        raise ConfigError(f"{path}: these weights do not fit the model\n  {shown}")
    model.load_state_dict(dict(state))


SHOWN = 10


def _read_state(path: Path) -> Mapping[str, Tensor]:
    if path.suffix not in (".safetensors", ".pt", ".pth"):
        raise ConfigError(f"{path}: weights must be a .safetensors file, or .pt/.pth with nothing but tensors")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except SafetensorError as error:
        raise ConfigError(f"{path}: not a safetensors file: {error}") from None
    except Exception as error:  # unpickling may raise any error
        raise ConfigError(f"{path}: holds more than tensors, or is broken; save model.state_dict(), best as "
                          f"safetensors: {first_line(error)}") from None
    if isinstance(state, Mapping) and isinstance(state.get("state_dict"), Mapping):
        state = state["state_dict"]
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ConfigError(f"{path}: must hold a state_dict, tensors by name")
    return state


def _library(name: str, extra: str, where: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(f'{where}: needs {name}, which is not installed; run: pip install "qtk[{extra}]"') from error


def _timm(name: str, pretrained: bool, where: str) -> nn.Module:
    timm = _library("timm", "vision", where)
    if not timm.is_model(name):
        raise ConfigError(f"{where}: timm has no model {name!r}; {nearest(name, timm.list_models())}")
    model = timm.create_model(name, pretrained=pretrained)
    assert isinstance(model, nn.Module)
    return model


def _timm_shape(name: str, model: nn.Module) -> Shape | None:
    settings = getattr(model, "default_cfg", None) or {}
    size = settings.get("input_size")
    return None if size is None else (1, *size)


def _torchvision(name: str, pretrained: bool, where: str) -> nn.Module:
    models = _library("torchvision.models", "vision", where)
    if name not in models.list_models():
        raise ConfigError(f"{where}: torchvision has no model {name!r}; {nearest(name, models.list_models())}")
    model = models.get_model(name, weights="DEFAULT" if pretrained else None)
    assert isinstance(model, nn.Module)
    return model


def _torchvision_shape(name: str, model: nn.Module) -> Shape | None:
    weights = import_module("torchvision.models").get_model_weights(name)
    crop = getattr(weights.DEFAULT.transforms(), "crop_size", None)
    match crop:
        case [int(size)]:
            return 1, 3, size, size
        case [int(height), int(width)]:
            return 1, 3, height, width
    return None


def _demo(name: str, pretrained: bool, where: str) -> nn.Module:
    model = import_module("qtk.demo.models").build(name)  # by name: the demo may not be imported from this floor
    assert isinstance(model, nn.Module)
    return model


def _hf(name: str, pretrained: bool, where: str) -> nn.Module:
    """The model of a folder that ``save_pretrained`` of transformers wrote: safetensors, and no code of its own."""
    try:
        return model_of_folder(Path(name).expanduser())
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


SOURCES: Mapping[str, ModelSource] = {
    "timm": ModelSource(_timm, _timm_shape, lambda: list(import_module("timm").list_models())),
    "torchvision": ModelSource(
        _torchvision, _torchvision_shape, lambda: list(import_module("torchvision.models").list_models())
    ),
    "demo": ModelSource(_demo, lambda name, model: (1, 1, 8, 8),
                        lambda: list(import_module("qtk.demo.models").DEMO_MODELS)),
    "hf": ModelSource(_hf, lambda name, model: None, lambda: ()),
}
