"""The model of a folder of safetensors, its weights mapped: the system reads them where they are used."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from qtk.errors import OUT_OF_MEMORY, ConfigError, first_line

SHOWN = 10
"""Names that a message lists."""


def model_of_folder(folder: Path, build: Callable[[], nn.Module] | None = None) -> nn.Module:
    """Returns the model of a folder, in eval mode. No code in the folder is run, and nothing is downloaded.

    Args:
        folder: holds ``*.safetensors``.
        build: makes the model, whose parameters get no memory while it runs; ``None``: it calls the class of
            transformers that ``config.json`` names, as ``save_pretrained`` wrote it.

    Raises: ConfigError if the folder or a package is missing, or the weights do not fit.
    """
    if build is not None and not callable(build):
        raise ConfigError(f"model: a {type(build).__name__} makes no model; give a class or function without arguments")
    if build is None and not os.path.isfile(folder / "config.json"):
        raise ConfigError(f"{str(folder)!r} is no folder with a config.json; give one that "
                          "model.save_pretrained(folder) wrote, nothing is downloaded")
    if not os.path.isdir(folder) or not any(folder.glob("*.safetensors")):
        raise ConfigError(f"{folder}: holds no *.safetensors, and other files of weights may run code when loaded; "
                          "write it with model.save_pretrained(folder)")
    return (_of_transformers(folder) if build is None else _built(folder, build)).eval()


def _of_transformers(folder: Path) -> nn.Module:
    try:
        transformers: Any = import_module("transformers")
    except ImportError as error:
        raise ConfigError('needs transformers, which is not installed; run: pip install "qtk[hf]"') from error
    options = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = transformers.AutoConfig.from_pretrained(folder, **options)
        named = [getattr(transformers, each, None) for each in config.architectures or ()]
        kind: Any = next((each for each in named
                          if isinstance(each, type) and issubclass(each, transformers.PreTrainedModel)), None)
        if kind is None:
            raise ConfigError(f"{folder}: its config.json has the architectures {config.architectures}, and "
                              "transformers has no model among them; build the model in Python, and name that "
                              "function as module:callable")
        model, info = kind.from_pretrained(folder, use_safetensors=True, output_loading_info=True, **options)
    except (*OUT_OF_MEMORY, ConfigError):
        raise
    except ImportError as error:
        raise ConfigError(f"{folder}: needs a package that is not installed: {first_line(error)}; install it, "
                          "or give the folder of the float model if this one is quantized") from error
    except Exception as error:  # whatever the values in a config.json lead to
        raise ConfigError(f"{folder}: cannot be loaded: {first_line(error)}; write the folder again with "
                          "model.save_pretrained(folder), or build the model in Python, and name that function as "
                          "module:callable") from error
    _refuse_lost(folder, sorted(info["missing_keys"]) + sorted(map(str, info.get("mismatched_keys") or ())))
    assert isinstance(model, nn.Module)
    return model


def _built(folder: Path, build: Callable[[], nn.Module]) -> nn.Module:
    with _without_weights():
        model = build()
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model: returned a {type(model).__name__}; it must return an nn.Module")
    try:
        tensors = {name: tensor for file in sorted(folder.glob("*.safetensors"))
                   for name, tensor in load_file(file).items()}
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{folder}: cannot be read as safetensors: {error}") from error
    own: dict[Tensor, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        own.setdefault(tensor, []).append(name)
    found = {tensor: tensors[known[0]] for tensor, names in own.items()
             if (known := [name for name in names if name in tensors])}  # a tied tensor has one of its names
    _refuse_lost(folder, [names[0] for tensor, names in own.items()
                          if tensor not in found or found[tensor].shape != tensor.shape])
    made: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = made.setdefault(parameter, nn.Parameter(
                    found[parameter], requires_grad=parameter.requires_grad and found[parameter].is_floating_point()))
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer in found:
                module._buffers[name] = found[buffer]
    return model


@contextmanager
def _without_weights() -> Iterator[None]:
    """Parameters that modules register in the body are on the meta device; buffers have values."""
    register = nn.Module.register_parameter

    def registered(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        is_real = isinstance(param, nn.Parameter) and not param.is_meta
        register(module, name, nn.Parameter(param.to("meta"), param.requires_grad) if is_real else param)  # type: ignore[union-attr]

    nn.Module.register_parameter = registered  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _refuse_lost(folder: Path, lost: list[str]) -> None:
    if lost:
        shown = ", ".join(lost[:SHOWN]) + (f", … {len(lost) - SHOWN} more" if len(lost) > SHOWN else "")
        raise ConfigError(f"{folder}: these weights are missing in its files, or of another shape: {shown}")


def files_beside(folder: Path) -> list[Path]:
    """Returns what lies beside weights and configs: the files of a tokenizer, chat templates, a licence."""
    config = {"config.json", "generation_config.json"}
    return [path for path in sorted(folder.iterdir()) if path.is_file() and path.name not in config
            and path.suffix not in (".safetensors", ".bin", ".pt", ".pth") and not _is_index(path)]


def _is_index(path: Path) -> bool:
    return path.name.endswith(".index.json") and "weight_map" in json.loads(path.read_text(encoding="utf-8"))
