"""Scores of tokens from logits: negative log-likelihoods, and the divergence of one distribution from another.

Both are computed from float32 log-softmaxes of a few rows at a time, so that memory does not grow with the number of
tokens; their sums are left to the caller.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

MOST_ELEMENTS = 1 << 22
"""Logits of one chunk: 16 MiB in float32, of which a few are held at a time."""


def negative_log_likelihoods(logits: Tensor, targets: Tensor) -> Tensor:
    """``-log softmax(logits)[target]`` of every row, in nats.

    Shape: ``logits`` [rows, vocabulary], any float; ``targets`` [rows], integer; result [rows], float32.

    >>> negative_log_likelihoods(torch.zeros(1, 4), torch.tensor([2])).exp()
    tensor([4.])
    """
    parts = [
        -_log_softmax(logits[rows]).gather(1, targets[rows, None].long()).squeeze(1) for rows in _chunks(logits)
    ]
    return torch.cat(parts) if parts else logits.new_zeros(0, dtype=torch.float32)


def divergences(reference: Tensor, logits: Tensor) -> Tensor:
    """The Kullback-Leibler divergence ``Σ p (log p - log q)`` of every row, p of ``reference``, in nats.

    Logits of -inf in both have no part in it.

    Shape: ``reference``, ``logits`` [rows, vocabulary], any float; result [rows], float32.

    >>> divergences(torch.tensor([[0.0, -torch.inf]]), torch.zeros(1, 2)).exp()
    tensor([2.])
    """
    parts = []
    for rows in _chunks(reference):
        log_p, log_q = _log_softmax(reference[rows]), _log_softmax(logits[rows])
        terms = log_p.exp() * (log_p - log_q)
        parts.append(torch.where(log_p == -torch.inf, 0.0, terms).sum(-1))
    return torch.cat(parts) if parts else logits.new_zeros(0, dtype=torch.float32)


def _log_softmax(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits.to(torch.float32), -1)


def _chunks(logits: Tensor) -> Iterator[slice]:
    """The rows, so many at a time that they have at most ``MOST_ELEMENTS``, but at least one."""
    count, vocabulary = logits.shape
    step = max(1, MOST_ELEMENTS // max(vocabulary, 1))
    for begin in range(0, count, step):
        yield slice(begin, begin + step)
