"""The reference of every key of a config and of a recipe, from the pydantic models that read them."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from typing import get_args

from pydantic import BaseModel

from qtk.cli.recipe import Recipe
from qtk.config.schema import QuantConfig

INTRODUCTIONS = {
    QuantConfig: ("Keys of a config", "A config is a YAML file, a mapping or the name of a shipped target; "
                  "[Configuration](configuration.md) shows one. An unknown key is an error that suggests the nearest."),
    Recipe: ("Keys of a recipe", "A recipe is the YAML file of `qtk quantize`; [Command line](cli.md) shows one. "
             "Relative paths are looked for beside it first."),
}


def reference(root: type[BaseModel]) -> str:
    """The page of ``root`` and of every model inside it: a table of keys, each with values, default and meaning."""
    title, introduction = INTRODUCTIONS[root]
    parts = [f"# {title}\n\n{introduction}\n"]
    for model in models(root):
        about, meanings = described(model)
        rows = [f"| `{name}` | {values} | {default} | {' '.join(meanings[name].split())} |"
                for name, values, default in keys(model)]
        parts.append("\n".join([f"## {model.__name__}\n", about, "", "| key | values | left out | meaning |",
                                "|---|---|---|---|", *(row.replace("``", "`") for row in rows), ""]))
    return "\n".join(parts)


def models(root: type[BaseModel]) -> list[type[BaseModel]]:
    """``root`` and all models that its fields hold, each once, in the order of their fields."""
    found = [root]
    for model in found:
        for field in model.model_fields.values():
            found += [each for each in _inside(field.annotation) + _inside(field.metadata) if each not in found]
    return list(dict.fromkeys(found))


def described(model: type[BaseModel]) -> tuple[str, dict[str, str]]:
    """The text of a model's docstring without its examples, and what its ``Args`` say of each field, inherited too."""
    meanings: dict[str, str] = {}
    for base in reversed([each for each in model.__mro__ if issubclass(each, BaseModel) and each is not BaseModel]):
        about, _, arguments = inspect.cleandoc(base.__doc__ or "").partition("Args:\n")
        block = re.match(r"(?:    .*\n?|\n)*", arguments)
        entries = re.findall(r"^    (\w+): (.*(?:\n {6,}.*)*)", block.group() if block else "", re.MULTILINE)
        meanings |= dict(entries)
    return about.partition(">>>")[0].strip().replace("``", "`"), meanings


def keys(model: type[BaseModel]) -> Iterator[tuple[str, str, str]]:
    """Name, values and default of every key, as texts for a table."""
    schema = model.model_json_schema()
    for name, field in model.model_fields.items():
        property_schema = schema["properties"][name]
        default = "**required**" if field.is_required() else _default(property_schema.get("default"))
        yield name, _values(property_schema, schema.get("$defs", {})), default


def _inside(annotation: object) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    arguments = annotation if isinstance(annotation, list) else get_args(annotation)
    return [each for argument in arguments for each in _inside(argument)]


def _default(value: object) -> str:
    return "" if value in (None, [], {}) or isinstance(value, dict) else f"`{json.dumps(value)}`"


def _values(schema: Mapping[str, object], definitions: Mapping[str, Mapping[str, object]]) -> str:
    """The values that a JSON schema allows, in words."""
    match schema:
        case {"$ref": str(reference)}:
            name = reference.rpartition("/")[2]
            definition = definitions[name]
            return f"[{name}](#{name.lower()})" if "properties" in definition else _values(definition, definitions)
        case {"anyOf": list(choices)} | {"oneOf": list(choices)}:
            return " or ".join(dict.fromkeys(_values(choice, definitions) for choice in choices))
        case {"const": value}:
            return f"`{json.dumps(value)}`".replace('"', "")
        case {"enum": list(values)}:
            return ", ".join(f"`{value}`" for value in values)
        case {"type": "array", "prefixItems": list(items)}:
            return f"[{', '.join(_values(item, definitions) for item in items)}]"
        case {"type": "array", "items": dict(items)}:
            return f"list of {_values(items, definitions)}"
        case {"type": "integer" | "number" as kind}:
            limits = (("minimum", "≥"), ("maximum", "≤"))
            bounds = "".join(f" {sign} {schema[key]}" for key, sign in limits if key in schema)
            return f"{kind}{bounds}"
        case {"type": "object", "additionalProperties": {"$ref": _} as inner}:
            return f"mapping of {_values(inner, definitions)}"
        case {"type": "object"}:
            return "mapping"
        case {"type": "null"}:
            return "`null`"
        case {"type": "boolean"}:
            return "`true`, `false`"
        case {"type": "string"}:
            return "text"
    return "any"
