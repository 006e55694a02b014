"""Loads a ``QuantConfig`` from a shipped name, a YAML or AIMET JSON file, or a mapping."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from qtk.config.files import folder_of, read_file, shipped, shipped_names
from qtk.config.mistakes import shown
from qtk.config.runtime import Runtime
from qtk.config.schema import QuantConfig
from qtk.config.tensor_setting import TensorSetting
from qtk.config.validate import validate
from qtk.errors import ConfigError
from qtk.registry import nearest


def load_config(source: str | Path | Mapping[str, object] | QuantConfig) -> QuantConfig:
    """Loads and validates a configuration.

    Args:
        source: the name of a shipped target (``default``), the path of a YAML file or of an AIMET JSON file (recognized
            by its keys), the mapping such a file holds, or a ``QuantConfig``, returned unchanged. A file or
            mapping with the key ``extends`` extends a shipped target or another file, whose path is relative to the
            file that names it; without it, nothing is inherited.

    Raises: ConfigError with file, line or path of each mistake; for an unknown name the nearest.

    >>> load_config({"version": 1, "rules": [{"match": {"op": "conv"}, "weight": {"bit": 4}}]})
    Traceback (most recent call last):
    qtk.errors.ConfigError: config: rules[0].weight.bit: unknown key; did you mean 'bits'? known: \
axis, bits, block_size, bounds, dtype, dynamic, granularity, min_fill, narrow_range, range, reduced_range, \
remainder, scheme, symmetric
    """
    if isinstance(source, QuantConfig):
        return source
    if isinstance(source, Mapping):
        return _from_value(source, "config", ())
    if not isinstance(source, (str, Path)):
        raise ConfigError(f"config must be a shipped name, a path or a mapping, got {shown(source)}; leave it out for "
                          "'default'")
    return _from_file(_path_of(Path(source)), ())


def precise_in(target: str | None) -> Literal[16, "float"]:
    """Returns the width of sites that lose too much on a target; without a target, as ``QuantConfig.precise``.

    >>> precise_in("onnxruntime"), precise_in(None)
    ('float', 16)
    """
    return (load_config(target) if target in shipped_names("targets") else QuantConfig(version=1)).precise


def runtime_of_target(target: str | None) -> Runtime | None:
    """Returns the runtime that a shipped target is for; ``None`` for other targets, or if none is named.

    >>> runtime_of_target("tensorrt").name.partition(",")[0], runtime_of_target("default"), runtime_of_target(None)
    ('TensorRT 11', None, None)
    """
    return load_config(target).runtime if target is not None and target in shipped_names("targets") else None


def _from_file(path: Path, above: tuple[Path, ...]) -> QuantConfig:
    """Reads a file that the files ``above`` extend, each the next."""
    if path.resolve() in above:
        circle = " → ".join(str(each) for each in (*above[above.index(path.resolve()):], path))
        raise ConfigError(f"configs extend each other in a circle: {circle}; one of them must stand for itself")
    if path.parent == folder_of("targets"):
        return _shipped_target(path, path.stat().st_mtime_ns)
    return _from_value(read_file(path), str(path), (*above, path.resolve()))


@functools.lru_cache(maxsize=32)
def _shipped_target(path: Path, modified_ns: int) -> QuantConfig:
    """A shipped target, parsed once: YAML takes 10 to 50 ms a file, and each simulation and export reads some."""
    return _from_value(read_file(path), str(path), (path.resolve(),))


def _from_value(value: object, name: str, above: tuple[Path, ...]) -> QuantConfig:
    if isinstance(value, Mapping) and "version" not in value:
        from qtk.config.aimet import from_aimet, is_aimet  # loaded here: qtk's own schema has a version

        if is_aimet(value):
            value = from_aimet(value, source=name)
    if isinstance(value, Mapping) and "extends" in value:
        extended = value["extends"]
        if not isinstance(extended, (str, Path)):
            raise ConfigError(f"{name}: extends must be a shipped name or the path of a file, got {shown(extended)}")
        base = _from_file(_path_of(Path(extended), above[-1].parent if above else Path()), above)
        extension = validate(QuantConfig, {key: item for key, item in value.items() if key != "extends"}, source=name)
        return _extended(base, extension)
    return validate(QuantConfig, value, source=name)


def _extended(base: QuantConfig, extension: QuantConfig) -> QuantConfig:
    """Merges two configs: settings field by field, rules of ``extension`` last, supergroups and ``exclude`` of both.

    Runtime and ``kv_cache`` come from ``extension``, if it names them.
    """
    defaults = {}
    for name in extension.defaults.model_fields_set:
        below, above = getattr(base.defaults, name), getattr(extension.defaults, name)
        both = isinstance(below, TensorSetting) and isinstance(above, TensorSetting)
        defaults[name] = below.overlaid(above) if both else above
    return QuantConfig(
        version=extension.version,
        defaults=base.defaults.model_copy(update=defaults),
        fold_batch_norms=(
            extension.fold_batch_norms if "fold_batch_norms" in extension.model_fields_set else base.fold_batch_norms
        ),
        split_gates=extension.split_gates if "split_gates" in extension.model_fields_set else base.split_gates,
        rules=(*base.rules, *extension.rules),
        supergroups=tuple(dict.fromkeys((*base.supergroups, *extension.supergroups))),
        exclude=tuple(dict.fromkeys((*base.exclude, *extension.exclude))),
        runtime=extension.runtime or base.runtime,
        kv_cache=extension.kv_cache or base.kv_cache,
        io=base.io.model_copy(update={name: getattr(extension.io, name) for name in extension.io.model_fields_set}),
    )


def _path_of(source: Path, folder: Path = Path()) -> Path:
    """The file of a shipped name, or of a path relative to ``folder``."""
    known = shipped_names("targets")
    if str(source) in known:
        return shipped("targets", str(source))
    path = folder / source
    if path.is_file():
        return path
    if not path.suffix and len(source.parts) == 1:
        raise ConfigError(f"config {str(source)!r} is neither a file nor shipped with qtk; {nearest(path.name, known)}")
    raise ConfigError(f"config file {path} does not exist; give the path of a YAML or AIMET JSON file, "
                      f"or a shipped name: {', '.join(known)}")
