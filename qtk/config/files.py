"""Reads YAML and JSON files; a repeated key in a mapping is an error."""

from __future__ import annotations

import json
from collections.abc import Hashable
from pathlib import Path

import yaml

from qtk.errors import ConfigError


def read_file(path: Path) -> object:
    """Parses a file: JSON if its suffix is ``.json``, else YAML.

    Raises: ConfigError with file and line if it cannot be read or parsed, or a key appears twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file in UTF-8 ({error.reason} at byte {error.start})") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    return _parse_json(text, path) if path.suffix == ".json" else _parse_yaml(text, path)


def _parse_json(text: str, path: Path) -> object:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        mapping: dict[str, object] = {}
        for key, value in pairs:
            if key in mapping:
                raise ConfigError(f"{path}: key {key!r} appears twice in one object; remove one of them")
            mapping[key] = value
        return mapping

    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}, line {error.lineno}: not JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; lists in lists in lists
        raise ConfigError(f"{path}: not JSON that can be read: {error}") from None


class _UniqueKeys(yaml.SafeLoader):
    """The safe loader, refusing repeated keys and scalars that are none of their tag, such as a date without a day."""

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
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{where}: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {error}") from None
