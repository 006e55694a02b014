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
        winner: the candidate that was taken: its methods and prior, or ``none``.
        held_out: errors before and after over held-out data; ``None`` if there are none.
        held_out_powers: ``signal`` and ``noise`` over held-out data.
        zeros: share of the weights that were kept at 0, of a pruned weight or a 2:4 mask.
    """

    name: str
    before: float = 0.0
    after: float = 0.0
    signal: float | None = None
    noise: float | None = None
    reason: str | None = None
    winner: str = ""
    held_out: tuple[float, float] | None = None
    held_out_powers: tuple[float | None, float | None] = (None, None)
    zeros: float = 0.0

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

    @property
    def held_out_sqnr_db(self) -> float | None:
        """``sqnr_db`` over held-out data."""
        signal, noise = self.held_out_powers
        return None if signal is None or noise is None else decibels(signal, noise)

    @property
    def held_out_sqnr_before_db(self) -> float | None:
        """``sqnr_before_db`` over held-out data."""
        signal, noise = self.held_out_powers
        if signal is None or noise is None or self.held_out is None:
            return None
        return decibels(signal, noise + self.held_out[0] - self.held_out[1])

    def __str__(self) -> str:
        if self.reason is not None:
            return f"{self.name}  {self.reason}"
        kept = f"  {self.zeros:.0%} zeros kept" if self.zeros else ""
        if self.sqnr_db is None:
            return f"{self.name}  error {self.before:.4g} → {self.after:.4g}{kept}"
        shown = f"{self.name}  {self.sqnr_before_db:.1f} → {self.sqnr_db:.1f} dB"
        if self.held_out_sqnr_before_db is not None:
            shown += f"  held out {self.held_out_sqnr_before_db:.1f} → {self.held_out_sqnr_db:.1f} dB"
        return f"{shown}  {self.winner}".rstrip() + kept


@dataclass(frozen=True)
class LayerwiseReport:
    """The result of a layer-wise run; printable.

    Args:
        layers: every layer in the order of the walk.
        skipped: the weights left as they are, each with the reason.
        restarted: the layers that an earlier run had changed, and that started from their float weights again.
        pooled: the weights of experts that took the Gram matrix of the rows of all, each with the few rows they met.
        dense: the weights that no mask was chosen for, though one was asked for, each with the reason.
        judged: methods → the divergence of the model's outputs from float over held-out samples, of all that were
            compared (``judge_parts``); ``plain rounding`` among them, to compare with.
        kept: the methods whose results the layers are, the least of ``judged`` but plain rounding.
    """

    layers: tuple[LayerResult, ...]
    skipped: Mapping[str, str] = field(default_factory=dict)
    restarted: tuple[str, ...] = ()
    pooled: Mapping[str, str] = field(default_factory=dict)
    dense: Mapping[str, str] = field(default_factory=dict)
    judged: Mapping[str, float] = field(default_factory=dict)
    kept: str | None = None

    def __str__(self) -> str:
        lines = [str(result) for result in self.layers]
        lines += [f"{name}  left as it is: {reason}" for name, reason in self.skipped.items()]
        lines += [f"{name}  by the Gram matrix of all experts' rows: {text}" for name, text in self.pooled.items()]
        lines += [f"{name}  dense: {reason}" for name, reason in self.dense.items()]
        if self.judged:
            shown = ", ".join(f"{name} {divergence:.4g}" for name, divergence in self.judged.items())
            lines.append(f"{self.kept} kept; divergence of the outputs over held-out samples: {shown}")
        if self.restarted:
            lines.append(f"{len(self.restarted)} layers started from their float weights, in place of the result of an "
                         "earlier call")
        return "\n".join(lines)
