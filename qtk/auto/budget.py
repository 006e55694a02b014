"""What no setting of a search may exceed: bytes of parameters, milliseconds of a call."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

from torch import nn

from qtk.auto.latency import WholeLatency
from qtk.calls.inputs import ExampleInputs
from qtk.errors import ConfigError
from qtk.quantsim import QuantSim

Limits: TypeAlias = Mapping[Literal["bytes", "milliseconds"], float]
"""What is counted → the most."""


class Budget:
    """A limit in bytes, in milliseconds, or in both.

    Args:
        limits: ``bytes`` or ``milliseconds`` → the most.
        model: the prepared model.
        example_inputs: what a call is measured on.

    Raises: ConfigError for a limit that is no positive number.

    >>> budget = Budget({"bytes": 1000.0}, nn.Identity(), ())
    >>> budget.exceeded(1200, None), budget.exceeded(900, None)
    ('1,200 bytes of parameters, of at most 1,000', None)
    """

    def __init__(self, limits: Limits, model: nn.Module, example_inputs: ExampleInputs) -> None:
        for name, limit in limits.items():
            if not 0 < limit < math.inf:
                raise ConfigError(f"budget: {name} must be a positive number, got {limit}")
        self._limits, self._model, self._example = limits, model, example_inputs
        self._latency: WholeLatency | None = None

    def milliseconds(self, simulation: Callable[[], QuantSim]) -> float | None:
        """Says how long a call takes in the runtime of the target; ``None`` if the budget has no milliseconds.

        Raises: ExportError if the runtime is missing, or the export fails; CalibrationError for a model in parts.
        """
        if "milliseconds" not in self._limits:
            return None
        if self._latency is None:
            self._latency = WholeLatency(self._model, self._example)
        return self._latency.ratio(simulation(), progress=False) * self._latency.first_ms

    def exceeded(self, size_bytes: int | None, latency_ms: float | None) -> str | None:
        """Says why a setting is too dear; ``None`` if it is not."""
        for limit, value, what in ((self._limits.get("bytes"), size_bytes, "bytes of parameters"),
                                   (self._limits.get("milliseconds"), latency_ms, "ms")):
            if limit is not None and value is not None and value > limit:
                return f"{value:,.6g} {what}, of at most {limit:,.6g}"
        return None
