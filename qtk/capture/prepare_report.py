"""The report of ``prepare_model``."""

from __future__ import annotations

from dataclasses import dataclass

UNCALLED = "not called"
"""The rung of a module that the example inputs do not reach."""


@dataclass(frozen=True, slots=True)
class Part:
    """How a submodule was captured by itself.

    Args:
        path: module path; empty for the model itself.
        type_name: name of its class.
        rung: ``export``, ``fx + export``, ``built``, ``python``, ``opaque``, ``excluded`` or ``not called``.
        parameters: number of elements of all its parameters.
        reason: why no better rung was reached, ``None`` if none is better.
    """

    path: str
    type_name: str
    rung: str
    parameters: int
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class PrepareReport:
    """How ``prepare_model`` captured a model, and how far the result is from it; printable.

    Args:
        rung: how the model was captured: ``export``, ``fx + export``, ``python`` (islands in the model's own code), or
            ``fx`` (no inputs yet).
        reasons: why a better rung or a dynamic batch was not reached.
        complete: whether the graph is in ATen; if not, ``QuantSim`` captures it when it has inputs.
        dynamic: whether some input size, such as the batch, may vary.
        swaps: modules recovered from the graph, by kind.
        unknown_ops: ops without a row in the op table.
        opaque_parts: composites and nested ops whose inside is not captured, with the reason where it is known.
        eval_difference: max |prepared - original| on the example inputs in eval mode; ``None``: not compared.
        train_difference: likewise in train mode with dropout off.
        captured: share of all parameter elements that are in graphs, 0 to 1.
        covered: share of all parameter elements that are quantized; ``None`` before there are quantizers.
        parts: how the model and its submodules were captured, if it is not one graph.
        excluded: the modules that are excluded from quantization.
        notes: warnings for the user.
        train_notes: what the original does in train mode and the prepared model does not.
        transforms: what rewrites did to the model afterwards, a line each.
        elapsed_s: duration of ``prepare_model`` in seconds.
    """

    rung: str
    complete: bool
    dynamic: bool
    reasons: tuple[str, ...] = ()
    swaps: tuple[tuple[str, int], ...] = ()
    unknown_ops: tuple[str, ...] = ()
    eval_difference: float | None = None
    train_difference: float | None = None
    opaque_parts: tuple[str, ...] = ()
    captured: float = 1.0
    covered: float | None = None
    parts: tuple[Part, ...] = ()
    excluded: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    train_notes: tuple[str, ...] = ()
    transforms: tuple[str, ...] = ()
    elapsed_s: float = 0.0

    def __str__(self) -> str:
        size = "dynamic" if self.dynamic else "static"
        lines = [f"captured by {self.rung} in {self.elapsed_s:.1f} s, {size} batch"]
        if self.parts:
            lines.append(f"graphs hold {self.captured:.1%} of the parameters")
            lines += [self._line(part) for part in self.parts]
        if self.covered is not None:
            lines.append(f"{self.covered:.1%} of the parameters are quantized")
        lines += [f"{count} × {kind} recovered as modules" for kind, count in self.swaps]
        lines += [
            f"max |prepared - original| in {mode} mode: {difference:.3g}"
            for mode, difference in (("eval", self.eval_difference), ("train", self.train_difference))
            if difference is not None
        ]
        lines += [f"not quantizable, no row in the op table: {name}" for name in self.unknown_ops]
        lines += [f"opaque, its inside is not quantized: {name}" for name in self.opaque_parts]
        if self.excluded:
            lines.append(f"excluded, in float with what they read: {', '.join(self.excluded)}")
        return "\n".join([*lines, *self.reasons, *self.notes, *self.train_notes, *self.transforms])

    def _line(self, part: Part) -> str:
        share = part.parameters / self.parts[0].parameters if self.parts[0].parameters else 0.0
        reason = "" if part.reason is None else f"  {part.reason}"
        return f"  {part.path or '(the model)'} ({part.type_name}): {part.rung}, {share:.1%} of the parameters{reason}"
