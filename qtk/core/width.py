"""Bit widths of weights and activations, as arguments of ``QuantSim``: a number, float, or the config's default."""

from __future__ import annotations

import enum
from typing import TypeAlias

from qtk.errors import EncodingError


class FromConfig(enum.Enum):
    """The one member ``FROM_CONFIG`` means the width in the config's defaults, or 8 if they have none."""

    FROM_CONFIG = "from_config"

    def __repr__(self) -> str:
        return self.name


FROM_CONFIG = FromConfig.FROM_CONFIG

Width: TypeAlias = int | FromConfig | None
"""A number of bits, ``FROM_CONFIG``, or ``None`` for float."""


def width_to_json(width: Width) -> int | str | None:
    """A JSON value that ``width_from_json`` reads as the same width.

    >>> width_to_json(FROM_CONFIG), width_to_json(8)
    ('from_config', 8)
    """
    return width.value if isinstance(width, FromConfig) else None if width is None else int(width)


def width_from_json(value: object) -> Width:
    """The width that ``width_to_json`` wrote.

    Raises: EncodingError if ``value`` is not an int, ``None`` or ``"from_config"``.

    >>> width_from_json("from_config"), width_from_json(None)
    (FROM_CONFIG, None)
    """
    if value == FROM_CONFIG.value:
        return FROM_CONFIG
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise EncodingError(f"not a width: {value!r}; must be a number of bits, null or {FROM_CONFIG.value!r}")
