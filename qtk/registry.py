"""Registries of names that users type: schemes, layer-wise methods, exporters; with suggestions for unknown names."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

from qtk.errors import ConfigError, QtkError

T = TypeVar("T")

LISTED = 400
"""Longest list of known names in an error message, in characters; a longer one is left out."""


def closest(name: str, known: Iterable[str], *, most: int = 1) -> list[str]:
    """Up to ``most`` known names close to ``name``.

    >>> closest("min_mx", ["min_max", "mse"])
    ['min_max']
    """
    return difflib.get_close_matches(name, known, n=most)


def did_you_mean(name: str, known: Iterable[str], *, most: int = 1) -> str:
    """A suggestion of up to ``most`` known names close to ``name``; empty if none is close.

    >>> did_you_mean("min_mx", ["min_max", "mse"])
    "did you mean 'min_max'?"
    """
    close = closest(name, known, most=most)
    return f"did you mean {' or '.join(map(repr, close))}?" if close else ""


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for an unknown name: the closest known name and the list of all, or only the closest if the list is long.

    >>> nearest("min_mx", ["min_max", "mse"])
    "did you mean 'min_max'? known: min_max, mse"
    >>> nearest("rleu", ["relu", "relu6", *map(str, range(1000))])
    "did you mean 'relu' or 'relu6'?"
    """
    names = sorted(known)
    listed = ", ".join(names)
    if len(listed) > LISTED:
        return did_you_mean(name, names, most=3) or f"there are {len(names)}, none of them close"
    return f"{did_you_mean(name, names)} known: {listed}".lstrip()


class Registry(Mapping[str, T], Generic[T]):
    """A mapping from names and aliases to values; ``what`` says in error messages what is registered.

    >>> schemes = Registry[int]("scheme")
    >>> schemes.add("min_max", 1, aliases=("post_training_tf",))
    >>> schemes["post_training_tf"]
    1

    A value that is made when its name is first used, by what a module then imported holds:

    >>> schemes.add_made("fraction", "fractions", "Fraction")
    >>> schemes["fraction"]
    Fraction(0, 1)
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self._values: dict[str, Callable[[], T]] = {}
        self._aliases: dict[str, str] = {}

    def add(self, name: str, value: T, *, aliases: tuple[str, ...] = ()) -> None:
        self._add(name, lambda: value, aliases)

    def add_made(self, name: str, module: str, maker: str, *, aliases: tuple[str, ...] = ()) -> None:
        """Registers what ``maker()`` of a module returns; the module is imported when the name is first used."""
        self._add(name, functools.cache(lambda: getattr(importlib.import_module(module), maker)()), aliases)

    def _add(self, name: str, value: Callable[[], T], aliases: tuple[str, ...]) -> None:
        for key in (name, *aliases):
            assert key not in self, f"{self.what} {key!r} is registered twice"
        self._values[name] = value
        self._aliases.update(dict.fromkeys(aliases, name))

    def canonical(self, name: str) -> str:
        """The registered name behind ``name``. Raises: ConfigError if unknown."""
        if not isinstance(name, str):
            raise ConfigError(f"a {self.what} is given by name, got {name!r}; known: {', '.join(self._values)}")
        name = self._aliases.get(name, name)
        if name not in self._values:
            raise ConfigError(f"unknown {self.what} {name!r}; {nearest(name, [*self._values, *self._aliases])}")
        return name

    def __getitem__(self, name: str) -> T:
        return self._values[self.canonical(name)]()

    def __contains__(self, name: object) -> bool:
        return name in self._values or name in self._aliases

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def configured(known: Registry[T], text: str, example: str) -> T:
    """The registered dataclass that ``text`` names, with the fields in parentheses replaced: ``mse(num_steps=50)``.

    Args:
        known: the registry; its values are frozen dataclasses.
        text: a name, or a name with settings.
        example: a name with settings, for messages.

    Raises: ConfigError if the name or a setting is unknown, or a setting has another type than its default.
    """
    what = known.what
    if not isinstance(text, str):
        raise ConfigError(f"a {what} is given by name, as in {example!r}, got {text!r}; known: {', '.join(known)}")
    if "(" not in text:
        return known[text]
    try:
        call = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: of deep nesting
        call = None
    match call:
        case ast.Call(ast.Name(name), [], keywords):
            return _with_settings(f"{what} {text[:LISTED]!r}", known[name], keywords)
    shown = text if len(text) <= LISTED else f"{text[:LISTED]}…"
    raise ConfigError(f"{what} {shown!r} is neither a name nor a name with settings, as in {example!r}; "
                      f"known: {', '.join(known)}")


def written(known: Registry[T], value: T) -> str:
    """Inverse of ``configured``: the name of ``value``, with the settings that differ from the defaults."""
    name = next(name for name, other in known.items() if type(other) is type(value))
    settings = ", ".join(
        f"{field.name}={getattr(value, field.name)!r}"
        for field in dataclasses.fields(value)  # type: ignore[arg-type]
        if getattr(value, field.name) != getattr(known[name], field.name)
    )
    return f"{name}({settings})" if settings else name


def _with_settings(where: str, default_value: T, keywords: Sequence[ast.keyword]) -> T:
    fields = {field.name for field in dataclasses.fields(default_value)}  # type: ignore[arg-type]
    settings: dict[str, object] = {}
    for keyword in keywords:
        if keyword.arg not in fields:
            takes = nearest(str(keyword.arg), fields) if fields else "it has none"
            raise ConfigError(f"{where}: unknown setting {keyword.arg!r}; {takes}")
        try:
            value = ast.literal_eval(keyword.value)
        except (ValueError, TypeError, RecursionError, MemoryError):
            raise ConfigError(f"{where}: the value of {keyword.arg} must be a plain number or name") from None
        default = getattr(default_value, keyword.arg)
        if not _is_like(value, default):
            raise ConfigError(f"{where}: {keyword.arg} must be like {default!r}, got {value!r}")
        settings[keyword.arg] = value
    if len(settings) < len(keywords):
        raise ConfigError(f"{where}: a setting is given twice; leave one out")
    try:
        changed: T = dataclasses.replace(default_value, **settings)  # type: ignore[type-var]
    except (QtkError, TypeError) as error:
        raise ConfigError(f"{where}: {error}") from None
    return changed


def _is_like(value: object, default: object) -> bool:
    """Says whether ``value`` has the type of ``default``; where that is ``None`` or a float, a number or ``None``."""
    if default is None or isinstance(default, float):
        return value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    return type(value) is type(default)
