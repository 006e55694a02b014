"""Errors of a value against its reference: SQNR in dB, and the maximum in units of scale."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def sqnr_db(reference: Tensor, value: Tensor) -> float:
    """Signal to quantization noise ratio, ``10·log10(Σ reference² / Σ (value - reference)²)`` in dB.

    ``inf`` if both are equal; ``-inf`` if the reference is all zero and the value is not.

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


def max_error_in_scales(reference: Tensor, value: Tensor, scale: Tensor) -> float:
    """Maximal absolute error divided by the smallest scale; 0 for empty tensors.

    >>> max_error_in_scales(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.5]), torch.tensor([0.5, 0.25]))
    2.0
    """
    if reference.numel() == 0:
        return 0.0
    return float((value.to(torch.float64) - reference.to(torch.float64)).abs().max()) / float(scale.min())
