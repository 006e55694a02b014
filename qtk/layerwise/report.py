"""The result of layer-wise methods, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from qtk.numerics.error import decibels


@dataclass(frozen=True, slots=True)
class LayerResult:
    """The result of layer-wise methods on one layer.

    Args:
        name: of its weight.
        before: squared error of the output before, summed, without its constant.
        after: the same afterwards.
        signal: sum of the squares of the float output; ``None`` if not measured.
        noise: squared error of the output afterwards, with its constant; ``None`` if not measured.
        reason: why the layer was not updated; ``None`` if it was.
    """

    name: str
    before: float = 0.0
    after: float = 0.0
    signal: float | None = None
    noise: float | None = None
    reason: str | None = None

    @property
    def sqnr_db(self) -> float | None:
        """SQNR of the output afterwards, against the float model's, in dB."""
        return None if self.signal is None or self.noise is None else decibels(self.signal, self.noise)

    @property
    def sqnr_before_db(self) -> float | None:
        """SQNR of the output before; an approximation without cross terms of blocks for weights in blocks."""
        if self.signal is None or self.noise is None:
            return None
        return decibels(self.signal, self.noise + self.before - self.after)

    def __str__(self) -> str:
        if self.reason is not None:
            return f"{self.name}  {self.reason}"
        if self.sqnr_db is None:
            return f"{self.name}  error {self.before:.4g} → {self.after:.4g}"
        return f"{self.name}  {self.sqnr_before_db:.1f} → {self.sqnr_db:.1f} dB"


@dataclass(frozen=True)
class LayerwiseReport:
    """Every layer in the order of the walk, and the weights left as they are, each with the reason; printable."""

    layers: tuple[LayerResult, ...]
    skipped: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [str(result) for result in self.layers]
        return "\n".join([*lines, *(f"{name}  left as it is: {reason}" for name, reason in self.skipped.items())])
