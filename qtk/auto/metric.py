"""The metric that a search of settings is judged by: a number, or a score of each sample, whose drop is promised."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from qtk.auto.promise import Promise
from qtk.errors import CalibrationError
from qtk.nn.eval_mode import evaluating
from qtk.public import runs_model

Evaluate: TypeAlias = Callable[[nn.Module], float | Tensor]
"""A metric of a model, higher is better: a number, or a score of each sample, [samples]."""

REPEATED = 0.01
"""Share of the samples that may have another score when the float model is evaluated again: kernels round."""

IN_FLOAT = "the float model"


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric and its value in float.

    Args:
        evaluate: gives a number or scores.
        in_float: the number, or the mean of the scores.
        promise: of scores; ``None`` of a number.
        labels: the class of each sample; ``None``: unknown.
    """

    evaluate: Evaluate
    in_float: float
    promise: Promise | None = None
    labels: Tensor | None = None

    @classmethod
    def of(
        cls, evaluate: Evaluate, model: nn.Module, max_drop: float, confidence: float, labels: Tensor | None
    ) -> Metric:
        """The metric of the float model, which is evaluated twice where it gives scores: their order must not change.

        Raises: CalibrationError if it is not finite, scores are not in [0, 1] or come in another order, or there is not
            one label for each; whatever ``evaluate`` raises.
        """
        value = _value(evaluate, model, IN_FLOAT)
        promise = None
        if isinstance(value, Tensor):
            again = _value(evaluate, model, IN_FLOAT)
            if not isinstance(again, Tensor) or again.shape != value.shape or (
                float(((again - value).abs() > REPEATED).double().mean()) > REPEATED
            ):
                raise CalibrationError("evaluate gives the float model other scores when called again: score the same "
                                       "samples in the same order each time (shuffle=False), or return their mean")
            promise, value = Promise(value, max_drop, confidence), float(value.mean())
        if labels is not None and (promise is None or labels.shape != promise.scores.shape):
            scores = "a number" if promise is None else f"{len(promise.scores)} scores"
            raise CalibrationError(f"labels must be the class of each sample that evaluate scores, got shape "
                                   f"{list(labels.shape)} where evaluate gives {scores}")
        return cls(evaluate, value, promise, labels)

    @property
    def samples(self) -> int | None:
        """The number of samples that are scored; ``None`` of a number."""
        return None if self.promise is None else len(self.promise.scores)

    def drop(self, model: nn.Module, step: str) -> tuple[float, list[float] | None]:
        """By how much the metric of a model is below float's on what the search sees, and the scores of all samples.

        Raises: CalibrationError as ``of``; whatever ``evaluate`` raises.
        """
        value = _value(self.evaluate, model, step)
        if self.promise is None:
            return self.in_float - float(value), None
        scores = torch.as_tensor(value).reshape(-1)
        return self.promise.searched_drop(scores), scores.tolist()


def _value(evaluate: Evaluate, model: nn.Module, what: str) -> float | Tensor:
    """The number, or the scores as float64 on the CPU. Raises: CalibrationError if not finite, or not in [0, 1]."""
    value = _called(evaluate, model)
    if isinstance(value, Tensor) and value.ndim == 1 and len(value) > 1:
        scores = value.detach().double().cpu()
        if not bool(((scores >= 0) & (scores <= 1)).all()):
            low, high = float(scores.min()), float(scores.max())
            raise CalibrationError(f"a score per sample must be from 0 to 1, and evaluate gives {low:g} to {high:g} for"
                                   f" {what}: a drop of scores without bounds cannot be promised; scale and clamp "
                                   "them, or return their mean")
        return scores
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise CalibrationError(f"evaluate must return a number, or a tensor [samples] of scores, got "
                               f"{type(value).__name__} for {what}") from None
    if not math.isfinite(number):
        raise CalibrationError(f"evaluate gives {number} for {what}; it must return a finite number, higher is better")
    return number


@runs_model
def _called(evaluate: Evaluate, model: nn.Module) -> object:
    with torch.no_grad(), evaluating(model):
        return evaluate(model)
