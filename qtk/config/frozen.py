"""The base of all parts of a config, and lists of names in them."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class Frozen(BaseModel):
    """A part of a config: it does not change, and has no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def _as_list(value: object) -> object:
    return (value,) if isinstance(value, str) else value


Names = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_as_list)]
"""Names; a file may give a single one without a list."""
