"""Upper bounds of counts that users set: beyond them a run takes hours, or more memory than there is."""

from __future__ import annotations

from numbers import Integral

from qtk.errors import CalibrationError

SHOWN_DIGITS = 20
"""Larger numbers are not written out in messages; Python refuses to write very large ones."""


def check_count(what: str, value: int, most: int) -> None:
    """Checks that ``value`` is an integer from 1 to ``most``.

    Args:
        what: what is counted, for the message.
        value: the number given.
        most: the bound.

    Raises: CalibrationError.

    >>> check_count("steps of mse", 10**9, 10_000)
    Traceback (most recent call last):
    qtk.errors.CalibrationError: steps of mse must be an integer from 1 to 10000, got 1000000000
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or not 1 <= value <= most:
        is_long = isinstance(value, Integral) and abs(value) >= 10**SHOWN_DIGITS
        shown = f"a number of more than {SHOWN_DIGITS} digits" if is_long else repr(value)
        raise CalibrationError(f"{what} must be an integer from 1 to {most}, got {shown}")
