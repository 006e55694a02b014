"""Evaluation of language models: perplexity, and divergence from the float model, of which less is better."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from qtk.analysis.perplexity import exp_of_mean
from qtk.data.headless import refuse_other_words
from qtk.data.token_batches import logits_of
from qtk.errors import CalibrationError, ConfigError
from qtk.numerics.token_scores import divergences, negative_log_likelihoods

PERPLEXITY, KL = "perplexity", "kl"
LEFT_OUT = -100
"""The label of a token that does not count, as in torch's cross-entropy."""


def perplexity(items: Iterable[tuple[object, object, object]]) -> float:
    """``exp`` of the mean negative log-likelihood of the labels, each of which the position before predicts.

    Shape: outputs [samples, tokens, vocabulary] (the first such tensor of a nested output), labels [samples, tokens],
    token ids, -100 where a token does not count.

    Raises: ConfigError if there are no such outputs or labels, no label counts, or one is none of the logits.

    >>> import torch
    >>> round(perplexity([(torch.zeros(1, 3, 8), torch.tensor([[5, 1, -100]]), None)]), 4)
    8.0
    """
    total, count = 0.0, 0
    for output, label, _ in items:
        ids = _labels(label)
        if ids is None:
            given = tuple(label.shape) if isinstance(label, Tensor) else type(label).__name__
            raise ConfigError(f"{PERPLEXITY} needs the token ids [samples, tokens] as label of each batch, got "
                              f"{given}; return (inputs, ids) from data.evaluation, with {LEFT_OUT} where a token is "
                              "padding")
        counted = ids[:, 1:] != LEFT_OUT
        logits, targets = _logits(output, ids)[:, :-1][counted], ids[:, 1:][counted]
        try:
            refuse_other_words(logits, targets)
        except CalibrationError as error:
            raise ConfigError(f"{PERPLEXITY}: {error}") from None
        scores = negative_log_likelihoods(logits, targets)
        total, count = total + float(scores.double().sum()), count + scores.numel()
    try:
        return exp_of_mean(total, count)
    except CalibrationError as error:
        raise ConfigError(f"{PERPLEXITY}: {error}") from None


def kl(items: Iterable[tuple[object, object, object]]) -> float:
    """The mean Kullback-Leibler divergence of the float model's distributions from the outputs', in nats per token.

    Shape: outputs as for ``perplexity``; labels likewise, or anything else, of which all tokens count.

    Raises: ConfigError if there are no such outputs, or no token counts.

    >>> import torch
    >>> logits = torch.tensor([[[0.0, 0.0], [0.0, 9.0]]])
    >>> kl([(logits, None, logits)])
    0.0
    """
    total, count = 0.0, 0
    for output, label, reference in items:
        ids = _labels(label)
        simulated, expected = _logits(output, ids), _logits(reference, ids)
        counted = slice(None) if ids is None else ids != LEFT_OUT
        width = expected.shape[-1]
        scores = divergences(expected[counted].reshape(-1, width), simulated[counted].reshape(-1, width))
        total, count = total + float(scores.double().sum()), count + scores.numel()
    if count == 0:
        raise ConfigError(f"{KL}: no token counts; data.evaluation returns labels of {LEFT_OUT} alone")
    return total / count


def _labels(label: object) -> Tensor | None:
    """Token ids; ``None`` for any other label."""
    is_ids = isinstance(label, Tensor) and label.ndim == 2 and not label.is_floating_point()
    return label.long() if is_ids and isinstance(label, Tensor) else None


def _logits(output: object, ids: Tensor | None) -> Tensor:
    """Raises: ConfigError if the model returned none."""
    try:
        return logits_of(output, None if ids is None else ids.shape)
    except CalibrationError as error:
        raise ConfigError(str(error)) from None


TOKEN_METRICS = {PERPLEXITY: perplexity, KL: kl}
"""Name in a recipe → metric of triples: output, label, and output of the float model."""
