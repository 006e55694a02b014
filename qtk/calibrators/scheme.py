"""The names users give to ways of finding ranges. To add one, add its line here."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Sequence
from typing import Protocol

from qtk.calibrators.entropy import Entropy
from qtk.calibrators.min_max import MinMax
from qtk.calibrators.moving_average import MovingAverage
from qtk.calibrators.mse import Mse
from qtk.calibrators.percentile import Percentile
from qtk.calibrators.tf_enhanced import TfEnhanced
from qtk.core.encoding import Encoding
from qtk.core.granularity import Granularity, PerTensor
from qtk.core.spec import QuantSpec
from qtk.errors import CalibrationError, ConfigError
from qtk.observers.observer import Observer
from qtk.registry import Registry, nearest


class Calibrator(Protocol):
    """Pairs the statistics it needs with the decision it makes from them; a frozen dataclass of plain numbers."""

    def observer(self, granularity: Granularity, *, static: bool = False) -> Observer:
        """A fresh observer for one site; of one that is ``static``, seen once and whole, if that is said."""
        ...

    def encodings(self, observers: Sequence[Observer], specs: Sequence[QuantSpec]) -> list[Encoding]:
        """The encodings for what ``observers``, all of this calibrator's, saw.

        Raises: CalibrationError if that was nothing.
        """
        ...


SCHEMES = Registry[Calibrator]("scheme")
SCHEMES.add("min_max", MinMax(), aliases=("post_training_tf",))
SCHEMES.add("moving_average", MovingAverage())
SCHEMES.add("percentile", Percentile())
SCHEMES.add("mse", Mse())
SCHEMES.add("entropy", Entropy())
SCHEMES.add("tf_enhanced", TfEnhanced(), aliases=("post_training_tf_enhanced",))


def calibrator(scheme: str) -> Calibrator:
    """The calibrator of a name, with its settings changed where some are given.

    Raises: ConfigError if the name, or a setting, is unknown or makes no sense.

    >>> calibrator("percentile(quantile=0.999)")
    Percentile(quantile=0.999, bins=1024)
    """
    if not isinstance(scheme, str):
        raise ConfigError(f"a scheme is given by name, as in 'mse' or 'mse(norm=1)', got {scheme!r}; "
                          f"known: {', '.join(SCHEMES)}")
    if "(" not in scheme:
        return SCHEMES[scheme]
    try:
        call = ast.parse(scheme.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        call = None
    match call:
        case ast.Call(ast.Name(name), [], keywords):
            return _changed(scheme, SCHEMES[name], keywords)
    raise ConfigError(f"scheme {scheme!r} is neither a name nor a name with settings, as in 'percentile(quantile="
                      f"0.999)'; known: {', '.join(SCHEMES)}")


def canonical_scheme(scheme: str) -> str:
    """``scheme`` by its registered name, and only with settings that are not the default.

    Raises: ConfigError as ``calibrator``.

    >>> canonical_scheme("post_training_tf_enhanced( gamma = 2.0, bins=512 )")
    'tf_enhanced(gamma=2.0)'
    """
    chosen = calibrator(scheme)
    name = next(name for name, known in SCHEMES.items() if type(known) is type(chosen))
    settings = ", ".join(
        f"{field.name}={getattr(chosen, field.name)!r}"
        for field in dataclasses.fields(chosen)  # type: ignore[arg-type]
        if getattr(chosen, field.name) != getattr(SCHEMES[name], field.name)
    )
    return f"{name}({settings})" if settings else name


def _changed(scheme: str, known: Calibrator, keywords: Sequence[ast.keyword]) -> Calibrator:
    fields = {field.name for field in dataclasses.fields(known)}  # type: ignore[arg-type]
    settings: dict[str, object] = {}
    for keyword in keywords:
        if keyword.arg not in fields:
            takes = nearest(str(keyword.arg), fields) if fields else "it has none"
            raise ConfigError(f"scheme {scheme!r}: unknown setting {keyword.arg!r}; {takes}")
        try:
            value = ast.literal_eval(keyword.value)
        except (ValueError, TypeError):
            raise ConfigError(f"scheme {scheme!r}: the value of {keyword.arg} must be a plain number or name") from None
        default = getattr(known, keyword.arg)
        if not _is_like(value, default):
            raise ConfigError(f"scheme {scheme!r}: {keyword.arg} must be like {default!r}, got {value!r}")
        settings[keyword.arg] = value
    if len(settings) < len(keywords):
        raise ConfigError(f"scheme {scheme!r}: a setting is given twice; leave one out")
    try:
        changed: Calibrator = dataclasses.replace(known, **settings)  # type: ignore[type-var]
        changed.observer(PerTensor())  # it checks its settings
    except (CalibrationError, TypeError) as error:
        raise ConfigError(f"scheme {scheme!r}: {error}") from None
    return changed


def _is_like(value: object, default: object) -> bool:
    """Of the type of the default; a whole number may stand for a real one, ``None`` for a real one too."""
    if isinstance(default, float):
        return value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    return type(value) is type(default)
