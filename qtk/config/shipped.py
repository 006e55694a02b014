"""Config and recipe files shipped with qtk: ``configs/`` of the repository, installed as ``qtk/configs``."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from qtk.errors import ConfigError
from qtk.registry import nearest


def shipped(kind: str, name: str) -> Path:
    """Path of a shipped file; ``kind`` is ``targets`` or ``recipes``.

    Raises: ConfigError for an unknown name, with suggestions.

    >>> shipped("targets", "default").name
    'default.yaml'
    """
    known = shipped_names(kind)
    if name not in known:
        raise ConfigError(f"no {kind.removesuffix('s')} called {name!r} comes with qtk; {nearest(name, known)}")
    return folder_of(kind) / f"{name}.yaml"


def shipped_names(kind: str) -> list[str]:
    """Names of the shipped files of a kind, sorted.

    >>> shipped_names("recipes")
    ['digits']
    """
    return sorted(path.stem for path in folder_of(kind).glob("*.yaml"))


def folder_of(kind: str) -> Path:
    """The folder of the shipped files of a kind."""
    package = Path(str(files("qtk")))
    installed = package / "configs" / kind
    return installed if installed.is_dir() else package.parent / "configs" / kind
