"""Finds the config and recipe files shipped with qtk (``configs/``, installed as ``qtk/configs``), and reads them.

They are YAML and JSON; a repeated key in a mapping is an error, and so is what no config or recipe needs.

That is a file above 256 KiB, nesting beyond 100 levels, and aliases that spell out more than 100,000 values: a few
lines of YAML can mean as many values as one likes.
"""

from __future__ import annotations

import json
from collections.abc import Hashable
from importlib.resources import files
from pathlib import Path

import yaml

from qtk.errors import ConfigError
from qtk.registry import nearest

MOST_BYTES = 1 << 18
MOST_LEVELS = 100
MOST_VALUES = 100_000
"""Values that a file may spell out, each counted as often as aliases repeat it."""


def read_file(path: Path) -> object:
    """Parses a file: JSON if its suffix is ``.json``, else YAML.

    Raises: ConfigError with file and line if it cannot be read or parsed, a key appears twice, or it is too large.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ConfigError(f"{path}: larger than {MOST_BYTES} bytes; a config or recipe has a few thousand")
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file in UTF-8 ({error.reason} at byte {error.start})") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    try:
        return _parse_json(text, path) if path.suffix == ".json" else _parse_yaml(text, path)
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply; at most {MOST_LEVELS} levels") from None
    except ValueError as error:  # numbers of thousands of digits, dates that are none
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: {error}") from None


def _parse_json(text: str, path: Path) -> object:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        mapping: dict[str, object] = {}
        for key, value in pairs:
            if key in mapping:
                raise ConfigError(f"{path}: key {key!r} appears twice in one object; remove one of them")
            mapping[key] = value
        return mapping

    try:
        value: object = json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}, line {error.lineno}: not JSON: {error.msg}") from None
    check_levels(value)
    return value


def check_levels(value: object, level: int = 0) -> None:
    """Checks that a parsed value is not nested deeper than ``MOST_LEVELS``. Raises: RecursionError."""
    if level > MOST_LEVELS:
        raise RecursionError
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        check_levels(inner, level + 1)


class _UniqueKeys(yaml.SafeLoader):
    """The safe loader, refusing repeated keys, bombs of aliases, and scalars that are none of their tag."""

    def fetch_flow_collection_start(self, TokenClass: type[yaml.Token]) -> None:
        if self.flow_level > MOST_LEVELS:  # the scanner's time grows with the square of the nesting
            raise RecursionError
        super().fetch_flow_collection_start(TokenClass)

    def add_indent(self, column: int) -> bool:
        if len(self.indents) > MOST_LEVELS:
            raise RecursionError
        return bool(super().add_indent(column))

    def get_single_node(self) -> yaml.Node | None:
        node: yaml.Node | None = super().get_single_node()
        if node is not None:
            _count(node, {}, 0)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> object:
        try:
            return super().construct_object(node, deep)
        except (yaml.YAMLError, RecursionError):
            raise
        except Exception as error:  # each type of scalar raises its own
            tag = node.tag.removeprefix("tag:yaml.org,2002:")
            problem = f"{node.value!r:.80} does not parse as {tag} ({error}); put a text in quotes"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        seen: set[object] = set()
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():  # `!!set 0` is none
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} appears twice in one mapping; remove one of them", key_node.start_mark
                )
            if isinstance(key, Hashable):
                seen.add(key)
        return super().construct_mapping(node, deep=deep)


def _parse_yaml(text: str, path: Path) -> object:
    try:
        return yaml.load(text, Loader=_UniqueKeys)
    except _TooManyError:
        raise ConfigError(f"{path}: its aliases spell out more than {MOST_VALUES} values; write less") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{where}: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {error}") from None


class _TooManyError(Exception):
    """The aliases of a file spell out more than ``MOST_VALUES`` values."""


def _count(node: yaml.Node, known: dict[yaml.Node, int | None], level: int) -> int:
    """The number of values that a node spells out.

    Args:
        node: a node; an alias is the node that it refers to.
        known: node → its number; ``None`` while it is being counted.
        level: the number of nodes around it.

    Raises: RecursionError below ``MOST_LEVELS``; ConstructorError for a node inside itself; _TooManyError.
    """
    if level > MOST_LEVELS:
        raise RecursionError
    if node not in known:
        known[node] = None
        inner = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else (
            node.value if isinstance(node, yaml.SequenceNode) else [])
        known[node] = 1 + sum(_count(part, known, level + 1) for part in inner)
    count = known[node]
    if count is None:
        raise yaml.constructor.ConstructorError(
            None, None, "an alias refers to what it is inside of; write it out", node.start_mark
        )
    if count > MOST_VALUES:
        raise _TooManyError
    return count


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
