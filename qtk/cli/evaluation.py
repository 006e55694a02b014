"""Evaluation of outputs: top-1 or the user's own metric; agreement and SQNR between two models' outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from qtk.cli.imported import RAISED, imported, what_it_did
from qtk.cli.token_evaluation import TOKEN_METRICS
from qtk.errors import ConfigError
from qtk.numerics.error import sqnr_db
from qtk.numerics.top1 import Top1
from qtk.torch_private import pytree

Pairs: TypeAlias = Iterable[tuple[object, object]]
"""Output and label, batch by batch."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A metric.

    Args:
        name: its name in the results.
        function: from pairs (output, label) to a number.
        of_tokens: the function gets triples, with the output of the float model, and less is better.
    """

    name: str
    function: Callable[..., object]
    of_tokens: bool = False

    @property
    def higher_is_better(self) -> bool:
        """Says whether a model is better the larger its value."""
        return not self.of_tokens

    def __call__(
        self, outputs: Iterable[object], labels: Iterable[object], references: Iterable[object] | None = None
    ) -> float:
        """The value of the metric.

        Args:
            outputs: of the model, batch by batch.
            labels: likewise.
            references: outputs of the float model; ``None``: these are.

        Raises: ConfigError if the function fails or does not return a number.
        """
        series = [outputs, labels, *([outputs if references is None else references] if self.of_tokens else [])]
        try:
            value = self.function(list(zip(*series, strict=True)))
        except ConfigError:
            raise
        except RAISED as error:
            contract = "; it gets a list of pairs (output, label), and returns a number" if ":" in self.name else ""
            raise ConfigError(f"evaluation {self.name}: {what_it_did(error)}{contract}") from error
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError(f"evaluation {self.name}: returned a {type(value).__name__}; it must return a number")
        return float(value)


def evaluation(name: str) -> Evaluation:
    """The metric ``top1``, ``perplexity`` or ``kl``, or a user's ``module:callable``.

    Raises: ConfigError if it cannot be imported.
    """
    if name == "top1":
        return Evaluation(name, top1)
    if name in TOKEN_METRICS:
        return Evaluation(name, TOKEN_METRICS[name], of_tokens=True)
    function = imported(name, where="evaluation")
    return Evaluation(name.rpartition(":")[2], function)


def top1(pairs: Pairs) -> float:
    """Top-1 accuracy, 0…1.

    Shape: outputs [..., classes] (the first tensor of a nested output), labels [...], integer.

    Raises: ConfigError if there are no such scores, or not one label for each.

    >>> top1([(torch.eye(4), torch.tensor([0, 1, 2, 0]))])
    0.75
    """
    counted = Top1()
    for output, label in pairs:
        scores = _scores(output)
        samples = tuple(scores.shape[:-1])
        if not isinstance(label, Tensor) or label.shape != samples:
            given = tuple(label.shape) if isinstance(label, Tensor) else type(label).__name__
            raise ConfigError(f"top1 needs a label for each of {samples} predictions, got {given}; "
                              "name another evaluation: module:callable")
        counted.add(scores, label)
    return counted.share or 0.0


Counted: TypeAlias = Sequence[Sequence[Tensor | None]]
"""Batch by batch, of each tensor that is returned, which elements count: bool of its shape; ``None``: all."""


def agreement(outputs: Iterable[object], others: Iterable[object], counted: Counted | None = None) -> float | None:
    """Share of equal predictions, 0…1; ``None`` if no output has any.

    The prediction is the class of the largest score, or the output itself if it is integer.

    >>> agreement([torch.eye(4)], [torch.eye(4)]), agreement([torch.tensor([1, 2])], [torch.tensor([1, 3])])
    (1.0, 0.5)
    """
    equal = total = 0
    for index, (output, other) in enumerate(zip(outputs, others, strict=True)):
        predicted, predicted_by_other = _predictions(output), _predictions(other)
        if predicted is not None and predicted_by_other is not None:
            same, which = predicted == predicted_by_other, counted[index][0] if counted is not None else None
            if which is not None:
                same = same[which if which.shape == same.shape else which.any(-1)]
            equal += int(same.sum())
            total += same.numel()
    return equal / total if total else None


def _predictions(output: object) -> Tensor | None:
    leaf = next((leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)), None)
    if leaf is None or not leaf.is_floating_point():
        return leaf
    return leaf.argmax(-1) if leaf.ndim > 1 and leaf.shape[-1] else None


def outputs_sqnr_db(
    references: Sequence[object], outputs: Sequence[object], counted: Counted | None = None
) -> float | None:
    """SQNR in dB of all floating-point outputs over all batches; ``None`` if there are none."""
    sides: tuple[list[Tensor], list[Tensor]] = ([], [])
    for index, both in enumerate(zip(references, outputs, strict=True)):
        first, second = (_tensors(side) for side in both)
        for place, pair in enumerate(zip(first, second, strict=True)):
            which = None if counted is None else counted[index][place]
            for side, leaf in zip(sides, pair if pair[0].is_floating_point() else (), strict=False):
                side.append((leaf if which is None else leaf[which]).flatten().double())
    if not sides[0]:
        return None
    reference, value = (torch.cat(side) for side in sides)
    return sqnr_db(reference, value)


def _scores(output: object) -> Tensor:
    """The first tensor, [..., classes]. Raises: ConfigError if there is none, or it has fewer than two axes."""
    leaf = next((leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)), None)
    if leaf is None or leaf.ndim < 2:
        shown = "no tensor" if leaf is None else f"a tensor of shape {tuple(leaf.shape)}"
        raise ConfigError(f"predictions are read from scores [samples, …, classes], the model returns {shown}")
    return leaf


def _tensors(output: object) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
