"""What happened when a model was prepared."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrepareReport:
    """The account ``prepare_model`` gives; print it.

    Args:
        rung: how the model was captured: ``export``, ``fx + export``, or ``fx`` (no inputs yet).
        reasons: why a better rung or a dynamic batch was not reached.
        complete: the graph is in ATen; ``QuantSim`` finishes it otherwise.
        dynamic: the batch dimension may vary.
        swaps: modules recovered from the graph, by kind.
        unknown_ops: ops the op table does not know.
        opaque_parts: parts whose inside the graph does not show.
        eval_difference: max |prepared - original| on the example inputs in eval mode; ``None``: not compared.
        train_difference: likewise in train mode with dropout off.
        notes: what a user should know.
        elapsed_s: seconds it took.
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
    notes: tuple[str, ...] = ()
    elapsed_s: float = 0.0

    def __str__(self) -> str:
        lines = [f"captured by {self.rung} in {self.elapsed_s:.1f} s, {'dynamic' if self.dynamic else 'static'} batch"]
        lines += [f"{count} × {kind} recovered as modules" for kind, count in self.swaps]
        lines += [
            f"max |prepared - original| in {mode} mode: {difference:.3g}"
            for mode, difference in (("eval", self.eval_difference), ("train", self.train_difference))
            if difference is not None
        ]
        lines += [f"not quantizable, no row in the op table: {name}" for name in self.unknown_ops]
        lines += [f"opaque, its inside is not quantized: {name}" for name in self.opaque_parts]
        return "\n".join([*lines, *self.reasons, *self.notes])
