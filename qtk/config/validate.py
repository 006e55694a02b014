"""The base of all parts of a config, lists of names in them, and their validation by pydantic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from qtk.config.mistakes import mistakes, shown
from qtk.errors import ConfigError

M = TypeVar("M", bound=BaseModel)


class Frozen(BaseModel):
    """A part of a config: it does not change, and has no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def _as_list(value: object) -> object:
    return (value,) if isinstance(value, str) else value


Names = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_as_list)]
"""Names; a file may give a single one without a list."""


def validate(model: type[M], data: object, *, source: str) -> M:
    """Validates ``data`` as an instance of ``model``.

    Args:
        model: the schema.
        data: the parsed file.
        source: the file, or a description of the data, for messages.

    Raises: ConfigError listing every mistake with its path, as in ``rules[2].weight.bits``.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"{source}: a mapping of keys is expected at the top, got {shown(data)}")
    try:
        return model.model_validate(data)
    except ValidationError as error:
        findings = mistakes(model, error)
    if len(findings) == 1:
        raise ConfigError(f"{source}: {findings[0]}")
    raise ConfigError(f"{source}: {len(findings)} mistakes\n  " + "\n  ".join(findings))
