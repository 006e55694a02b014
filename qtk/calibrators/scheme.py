"""Schemes: the registered names of calibrators. To add one, add its line here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from qtk.calibrators.min_max import MinMax
from qtk.core.encoding import Encoding
from qtk.core.granularity import Granularity, PerTensor
from qtk.core.spec import QuantSpec
from qtk.errors import CalibrationError, ConfigError
from qtk.observers.observer import Observer
from qtk.registry import Registry, configured, written


class Calibrator(Protocol):
    """Creates observers and computes encodings from what they saw; a frozen dataclass of plain numbers."""

    def observer(self, granularity: Granularity, *, static: bool = False) -> Observer:
        """A new observer for one site; ``static``: for a tensor that is observed once, such as a weight."""
        ...

    def encodings(self, observers: Sequence[Observer], specs: Sequence[QuantSpec]) -> list[Encoding]:
        """The encodings for the statistics of ``observers``, which this calibrator created.

        A range lies within what was seen, and is not empty unless all values are 0.

        Raises: CalibrationError if one saw nothing.
        """
        ...


SCHEMES = Registry[Calibrator]("scheme")
SCHEMES.add("min_max", MinMax(), aliases=("post_training_tf",))
SCHEMES.add_made("moving_average", "qtk.calibrators.moving_average", "MovingAverage")
SCHEMES.add_made("percentile", "qtk.calibrators.percentile", "Percentile")
SCHEMES.add_made("mse", "qtk.calibrators.mse", "Mse")
SCHEMES.add_made("weight_mse", "qtk.calibrators.weight_mse", "WeightMse")
SCHEMES.add_made("activation_mse", "qtk.calibrators.activation_mse", "ActivationMse")
SCHEMES.add_made("entropy", "qtk.calibrators.entropy", "Entropy")
SCHEMES.add_made("tf_enhanced", "qtk.calibrators.tf_enhanced", "TfEnhanced", aliases=("post_training_tf_enhanced",))


def calibrator(scheme: str) -> Calibrator:
    """The calibrator with a registered name, with the settings in parentheses if there are any.

    Raises: ConfigError if the name or a setting is unknown, or a setting is out of range.

    >>> calibrator("percentile(quantile=0.999)")
    Percentile(quantile=0.999, bins=1024)
    """
    result = configured(SCHEMES, scheme, "percentile(quantile=0.999)")
    try:
        result.observer(PerTensor())  # observers check settings too
    except (CalibrationError, TypeError) as error:
        raise ConfigError(f"scheme {scheme!r}: {error}") from None
    return result


def canonical_scheme(scheme: str) -> str:
    """``scheme`` with its registered name in place of an alias, and only the settings that differ from the default.

    Raises: ConfigError as ``calibrator``.

    >>> canonical_scheme("post_training_tf_enhanced( gamma = 2.0, bins=512 )")
    'tf_enhanced(gamma=2.0)'
    """
    return written(SCHEMES, calibrator(scheme))
