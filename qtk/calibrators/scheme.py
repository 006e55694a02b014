"""Schemes: the names of the ways to find ranges. To add one, add its line here."""

from __future__ import annotations

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
from qtk.registry import Registry, configured, written


class Calibrator(Protocol):
    """Pairs the statistics it needs with the decision it makes from them; a frozen dataclass of plain numbers."""

    def observer(self, granularity: Granularity, *, static: bool = False) -> Observer:
        """A new observer for one site; ``static``: of a tensor that is observed once."""
        ...

    def encodings(self, observers: Sequence[Observer], specs: Sequence[QuantSpec]) -> list[Encoding]:
        """The encodings for what ``observers``, made by this calibrator, saw.

        Raises: CalibrationError if one saw nothing.
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

    Raises: ConfigError if the name or a setting is unknown, or a setting is out of range.

    >>> calibrator("percentile(quantile=0.999)")
    Percentile(quantile=0.999, bins=1024)
    """
    chosen = configured(SCHEMES, scheme, "percentile(quantile=0.999)")
    try:
        chosen.observer(PerTensor())  # it checks its settings
    except (CalibrationError, TypeError) as error:
        raise ConfigError(f"scheme {scheme!r}: {error}") from None
    return chosen


def canonical_scheme(scheme: str) -> str:
    """``scheme`` under its registered name, with only the settings that differ from the default.

    Raises: ConfigError as ``calibrator``.

    >>> canonical_scheme("post_training_tf_enhanced( gamma = 2.0, bins=512 )")
    'tf_enhanced(gamma=2.0)'
    """
    return written(SCHEMES, calibrator(scheme))
