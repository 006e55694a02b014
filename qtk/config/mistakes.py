"""The mistakes that pydantic finds in a config, as sentences: key path, value, expectation and nearest known key."""

from __future__ import annotations

import reprlib
import typing
from collections.abc import Sized

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from qtk.registry import nearest

UNION_TAGS = ("<word>", "<setting>")
RULE_TAGS = ("<tensors>", "<opset>", "<operators>", "<neighbours>")
"""Tags of union alternatives; pydantic adds them to key paths, from which ``_finding`` removes them."""

SHOWN_CHARACTERS = 80

_SHORT = reprlib.Repr()
_SHORT.maxlevel = 4
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = SHOWN_CHARACTERS + 1


def mistakes(model: type[BaseModel], error: ValidationError) -> list[str]:
    """A line for each mistake, with its path, as in ``rules[2].weight.bits``."""
    return [_finding(model, details) for details in error.errors(include_url=False) if not _is_echo(details)]


def _finding(model: type[BaseModel], details: ErrorDetails) -> str:
    path = tuple(part for part in details["loc"] if part not in (*UNION_TAGS, *RULE_TAGS))
    where = _path_text(path)
    given, context = shown(details["input"]), details.get("ctx", {})
    match details["type"]:
        case "extra_forbidden":
            hint = nearest(str(path[-1]), _keys_at(model, path[:-1]))
            return f"{where}: unknown key; {hint}"
        case "missing":
            return f"{where}: missing; add this key"
        case "value_error":
            text = str(context["error"])
            return f"{where}: {text}" if where else text
        case "greater_than_equal":
            return f"{where}: got {given}; must be at least {context['ge']}"
        case "less_than_equal":
            return f"{where}: got {given}; must be at most {context['le']}"
        case "literal_error":
            return f"{where}: got {given}; must be {context['expected']}"
        case "model_type" | "model_attributes_type" | "dict_type":
            keys = f" with keys of {', '.join(_keys_at(model, path))}" if _keys_at(model, path) else ""
            return f"{where}: got {given}; must be a mapping{keys}"
        case "tuple_type" | "list_type":
            return f"{where}: got {given}; must be a list"
        case "string_pattern_mismatch":
            return f"{where}: got {given}; must match {context['pattern']}"
        case "string_too_short":
            return f"{where}: got {given}; must not be empty"
        case "too_short":
            return f"{where}: got {given}; needs at least {context['min_length']} elements"
    text = details["msg"].removeprefix("Input ").removeprefix("should ")
    return f"{where}: got {given}; must {text}"


def _is_echo(details: ErrorDetails) -> bool:
    """Says whether a too_short error only repeats errors in the elements of a list, which are reported separately."""
    value = details["input"]
    return details["type"] == "too_short" and isinstance(value, Sized) and len(value) >= details["ctx"]["min_length"]


def _path_text(path: tuple[int | str, ...]) -> str:
    """Formats a key path.

    >>> _path_text(("rules", 2, "weight", "bits"))
    'rules[2].weight.bits'
    """
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def shown(value: object) -> str:
    """The beginning of ``repr(value)``; of nested values the first few, for the whole may be without end."""
    text = _SHORT.repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"


def _keys_at(model: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    """The keys of the schema at ``path``; empty if it does not expect a mapping with fixed keys there."""
    models = [model]
    for part in path:
        if isinstance(part, str):
            annotations = [m.model_fields[part].annotation for m in models if part in m.model_fields]
            models = [inner for annotation in annotations for inner in _models_in(annotation)]
    return list(dict.fromkeys(name for m in models for name in m.model_fields))


def _models_in(annotation: object) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in typing.get_args(annotation) for model in _models_in(argument)]
