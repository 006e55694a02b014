"""The error of a value against its reference: SQNR in dB."""

from __future__ import annotations

import math

from torch import Tensor


def sqnr_db(reference: Tensor, value: Tensor) -> float:
    """Signal to quantization noise ratio, ``10·log10(Σ reference² / Σ (value - reference)²)`` in dB.

    ``inf`` if both are equal; ``-inf`` if the reference is all zero and the value is not.

    >>> import torch
    >>> sqnr_db(torch.tensor([10.0]), torch.tensor([11.0]))
    20.0
    """
    return decibels(
        float(reference.double().square().sum()), float((value.double() - reference.double()).square().sum())
    )


def decibels(signal: float, noise: float) -> float:
    """``10·log10(signal / noise)`` in dB; ``inf`` without noise, ``-inf`` without signal."""
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf
