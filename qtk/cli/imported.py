"""Imports callables of the user's code, given as ``module:callable``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from qtk.errors import ConfigError
from qtk.registry import nearest

RAISED = (Exception, SystemExit)
"""What a user's code may raise; sys.exit would end the command without a word."""


def imported(locator: str, *, where: str) -> Callable[..., object]:
    """Imports the callable that ``locator`` names.

    Args:
        locator: ``package.module:name``; the name may have dots.
        where: the key in the recipe, for messages.

    Raises: ConfigError if it has another form, cannot be imported, or is not callable.

    >>> imported("math:hypot", where="example")(3, 4)
    5.0
    """
    module_name, colon, name = locator.partition(":")
    if not colon or not module_name or not name:
        raise ConfigError(f"{where}: got {locator!r}; must be module:callable, as in my_project.data:batches")
    try:
        value: object = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"{where}: cannot import {module_name!r}: {error}; the installed packages, the current "
                          "directory and the directory of the recipe were searched") from error
    except RAISED as error:
        raise ConfigError(f"{where}: importing {module_name!r} {what_it_did(error)}") from error
    for part in name.split("."):
        if not hasattr(value, part):
            raise ConfigError(f"{where}: {module_name} has no {name!r}; {nearest(part, vars(value))}")
        value = getattr(value, part)
    if not callable(value):
        raise ConfigError(f"{where}: {locator} is a {type(value).__name__}; it must be callable")
    return value


def load_callable(locator: str, *, where: str) -> object:
    """Imports the callable that ``locator`` names, and calls it without arguments.

    Raises: ConfigError as ``imported``, or with the error the call raised.
    """
    function = imported(locator, where=where)
    try:
        return function()
    except ConfigError:
        raise
    except RAISED as error:
        raise ConfigError(f"{where}: {locator}() {what_it_did(error)}") from error


def what_it_did(error: BaseException) -> str:
    """Returns what a user's code did instead of returning, for messages.

    >>> what_it_did(SystemExit(0))
    'called sys.exit(0), which ends the program; put that under `if __name__ == "__main__":`'
    """
    if isinstance(error, SystemExit):
        return f'called sys.exit({error.code!r}), which ends the program; put that under `if __name__ == "__main__":`'
    return f"raised {type(error).__name__}: {error}"


@contextmanager
def search_path(*folders: Path) -> Iterator[None]:
    """Appends ``folders`` to ``sys.path`` for the duration of the context."""
    added = [folder for folder in map(str, folders) if folder not in sys.path]
    sys.path.extend(added)
    try:
        yield
    finally:
        for folder in added:
            sys.path.remove(folder)
