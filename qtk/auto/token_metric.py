"""The metrics of language models by name, for the search of settings: higher is better, so both are negated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from torch import nn

from qtk.analysis.divergence import divergence_of
from qtk.analysis.perplexity import perplexity
from qtk.data.forward_pass import Batch, Forward
from qtk.data.valid_tokens import Valid
from qtk.errors import ArgumentError


def token_metric(
    name: Literal["perplexity", "kl"], reference: nn.Module, batches: Sequence[Batch], forward: Forward | None,
    valid: Valid | None,
) -> Callable[[nn.Module], float]:
    """The function from a model to its metric on ``batches``.

    Args:
        name: of the metric, which the function has.
        reference: the float model.
        batches: token ids.
        forward: how to run a model on a batch.
        valid: which tokens count: one mask, by its name or a function.

    Raises: ArgumentError for the masks of two sides.
    """
    if valid is not None and not (isinstance(valid, str) or callable(valid)):
        raise ArgumentError(f"evaluate={name!r} is for decoders, with the tokens of one mask, got valid={valid!r}; "
                            "name the mask of the tokens that are predicted, or pass a function as evaluate")

    def metric(model: nn.Module) -> float:
        if name == "perplexity":
            return -perplexity(model, batches, forward=forward, valid=valid, progress=False)
        return -divergence_of(model, reference, batches, forward=forward, valid=valid).mean

    metric.__name__ = name
    return metric
