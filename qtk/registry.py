"""Names that users type: schemes, exporters. Unknown names answer with the known ones and the nearest."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Generic, TypeVar

from qtk.errors import ConfigError

T = TypeVar("T")


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint naming the closest known name, or all of them: ``did you mean 'min_max'?``.

    >>> nearest("min_mx", ["min_max", "mse"])
    "did you mean 'min_max'? known: min_max, mse"
    """
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}known: {', '.join(names)}"


class Registry(Mapping[str, T], Generic[T]):
    """Values by name and alias, for one kind of thing (``what``, used in messages).

    >>> schemes = Registry[int]("scheme")
    >>> schemes.add("min_max", 1, aliases=("post_training_tf",))
    >>> schemes["post_training_tf"]
    1
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self._values: dict[str, T] = {}
        self._aliases: dict[str, str] = {}

    def add(self, name: str, value: T, *, aliases: tuple[str, ...] = ()) -> None:
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
        return self._values[self.canonical(name)]

    def __contains__(self, name: object) -> bool:
        return name in self._values or name in self._aliases

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)
