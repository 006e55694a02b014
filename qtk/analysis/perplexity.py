"""Measures the perplexity of a language model, in float or simulated."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from torch import nn

from qtk.data.forward_pass import Batch, Forward, outputs, run_batch
from qtk.data.headless import embedding_shapes, refuse_hidden_states, refuse_other_words
from qtk.data.token_batches import (
    TokenBatch,
    TokenData,
    Tokenizer,
    ValidTokensOf,
    is_encoder_decoder,
    token_batches,
)
from qtk.errors import CalibrationError
from qtk.graph.simulation import HasSimulation
from qtk.numerics.token_scores import negative_log_likelihoods
from qtk.public import public


@public
def perplexity(
    model: nn.Module | HasSimulation, data: TokenData, *, tokenizer: Tokenizer | None = None,
    length: int | None = None, forward: Forward | None = None, num_batches: int | None = None,
    valid: ValidTokensOf | None = None, progress: bool = True,
) -> float:
    """Measures the perplexity of a language model: ``exp`` of the mean negative log-likelihood of its tokens.

    >>> import qtk, torch
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Embedding(50, 16), torch.nn.Linear(16, 50)).eval()
    >>> ids = torch.randint(0, 50, (4, 12))
    >>> sim = qtk.QuantSim(model, ids, activation_bits=None)
    >>> sim.compute_encodings(None)
    >>> round(qtk.perplexity(model, ids, progress=False)), round(qtk.perplexity(sim, [ids, ids], progress=False))
    (57, 57)

    Batches with padding say which tokens count by an ``attention_mask``; a token counts if it and the token before it
    do, as do all but the first of a sample:

    >>> mask = torch.arange(12).expand(4, 12) < 6
    >>> found = qtk.perplexity(model, ids, valid=lambda batch: mask, progress=False)
    >>> found == qtk.perplexity(model, ids[:, :6], progress=False)
    True

    Batches of an encoder-decoder have ``decoder_input_ids``, scored as above, or ``labels``, each the token that its
    own position is to predict; negative labels do not count.

    A text file needs a tokenizer, and is cut into samples of ``length`` tokens, without what remains; the numbers of
    papers depend on both.

    Args:
        model: a float model, a prepared one, ``sim`` or ``sim.model``.
        data: batches of token ids: tensors [samples, tokens], or dicts with ``input_ids`` (of an encoder-decoder
            ``decoder_input_ids`` or ``labels`` too); one such batch; or the path of a text file.
        tokenizer: from the text to its token ids, as transformers' ``AutoTokenizer.from_pretrained(…)``.
        length: tokens of a sample of the text; ``None``: 512.
        forward: how to run the model on a batch and get logits [samples, tokens, vocabulary].
        num_batches: how many batches are taken; ``None``: all.
        valid: which tokens are no padding: a key of the batches, or a function from a batch to the mask
            [samples, tokens]; ``None``: ``attention_mask``, of a decoder behind an encoder
            ``decoder_attention_mask``, where a batch has it.
        progress: show a bar.

    Raises: CalibrationError without tokens that count, for batches without token ids, or a model without such logits,
        as one without a head.
    """
    network = model if isinstance(model, nn.Module) else model.simulation.model
    embeddings, total, count = embedding_shapes(network), 0.0, 0

    batches = token_batches(data, tokenizer, length)
    for output, batch in _with_batches(network, batches, forward or run_batch, num_batches, progress):
        tokens = TokenBatch.of(batch, valid, is_encoder_decoder=is_encoder_decoder(network))
        logits, (targets, scored) = tokens.logits(output), tokens.targets()
        targets, scored = targets.to(logits.device), scored.to(logits.device)
        refuse_hidden_states(logits, tokens.ids, embeddings)
        refuse_other_words(logits, targets[scored])
        scores = negative_log_likelihoods(logits[scored], targets[scored])
        total, count = total + float(scores.cpu().double().sum()), count + scores.numel()
    return exp_of_mean(total, count)


def _with_batches(
    network: nn.Module, batches: Iterable[Batch], forward: Forward, num_batches: int | None, progress: bool
) -> Iterator[tuple[object, Batch]]:
    """The output for each batch, and the batch."""

    def both(module: nn.Module, batch: Batch) -> tuple[object, Batch]:
        return forward(module, batch), batch

    for made in outputs(network, batches, forward=both, num_batches=num_batches, label="perplexity",
                        progress=progress):
        assert isinstance(made, tuple)
        yield made


def exp_of_mean(total: float, count: int) -> float:
    """The perplexity of ``count`` tokens with negative log-likelihoods of this sum; inf beyond what a float holds.

    Raises: CalibrationError if no token counts.
    """
    if count == 0:
        raise CalibrationError("no token counts: samples have at least two tokens, of which the first is given")
    mean = total / count
    try:
        return math.exp(mean)
    except OverflowError:
        return math.inf
