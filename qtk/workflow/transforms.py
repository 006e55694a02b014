"""The registered names of transforms, as recipes give them. To add one, add its line here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from qtk.data.forward_pass import Data, Forward
from qtk.data.valid_tokens import Valid
from qtk.public import public
from qtk.registry import Registry, configured
from qtk.transforms.result import TransformResult
from qtk.transforms.rewrite import Rewritable
from qtk.workflow.equalize import equalize_model
from qtk.workflow.fold_batch_norms import fold_batch_norms
from qtk.workflow.smooth_quant import apply_smooth_quant, migration_strength


class Transform(Protocol):
    """A transform with its settings: a frozen dataclass of plain numbers."""

    def apply(
        self, sim: Rewritable, data: Data, *, forward: Forward | None = None, num_batches: int | None = None,
        progress: bool = True, valid: Valid | None = None,
    ) -> TransformResult:
        """Applies it to a simulation; ``data``, ``forward`` and the rest are for transforms that need data."""
        ...


@public
@dataclass(frozen=True, slots=True)
class FoldBatchNorms:
    """``qtk.fold_batch_norms``."""

    def apply(
        self, sim: Rewritable, data: Data, *, forward: Forward | None = None, num_batches: int | None = None,
        progress: bool = True, valid: Valid | None = None,
    ) -> TransformResult:
        return fold_batch_norms(sim)


@public
@dataclass(frozen=True, slots=True)
class Equalize:
    """``qtk.equalize_model``."""

    def apply(
        self, sim: Rewritable, data: Data, *, forward: Forward | None = None, num_batches: int | None = None,
        progress: bool = True, valid: Valid | None = None,
    ) -> TransformResult:
        return equalize_model(sim)


@public
@dataclass(frozen=True, slots=True)
class SmoothQuant:
    """``qtk.apply_smooth_quant``; without ``alpha``, the best for each group."""

    alpha: float | None = None

    def __post_init__(self) -> None:
        migration_strength("auto" if self.alpha is None else self.alpha)

    def apply(
        self, sim: Rewritable, data: Data, *, forward: Forward | None = None, num_batches: int | None = None,
        progress: bool = True, valid: Valid | None = None,
    ) -> TransformResult:
        alpha = "auto" if self.alpha is None else self.alpha
        return apply_smooth_quant(sim, data, alpha=alpha, forward=forward,  # type: ignore[arg-type]
                                  num_batches=num_batches, progress=progress, valid=valid)


TRANSFORMS = Registry[Transform]("transform")
TRANSFORMS.add("fold_batch_norms", FoldBatchNorms())
TRANSFORMS.add("smooth_quant", SmoothQuant())
TRANSFORMS.add("equalize", Equalize())


def transform(text: str) -> Transform:
    """The transform with a registered name, with the settings in parentheses if there are any.

    Raises: ConfigError if the name, or a setting, is unknown or makes no sense.

    >>> transform("smooth_quant(alpha=0.5)")
    SmoothQuant(alpha=0.5)
    >>> transform("smoothquant")
    Traceback (most recent call last):
    qtk.errors.ConfigError: unknown transform 'smoothquant'; did you mean 'smooth_quant'? known: equalize, \
fold_batch_norms, smooth_quant
    """
    return configured(TRANSFORMS, text, "smooth_quant(alpha=0.5)")
