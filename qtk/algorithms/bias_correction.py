"""Bias correction (Nagel et al., arXiv 1906.04721, section 4.2, with measured means): outputs keep their mean."""

from __future__ import annotations

from torch import Tensor


def bias_correction(weight: Tensor, rounded: Tensor, mean: Tensor, mean_difference: Tensor | None) -> Tensor:
    """What to add to the bias: the mean of ``X w - X̂ ŵ`` over rows.

    Shape: ``weight`` w and ``rounded`` ŵ [groups, outputs, columns]; ``mean`` of X̂ and ``mean_difference`` of X - X̂
    [groups, columns], ``None`` for 0; result [groups · outputs].
    """
    shift = ((weight - rounded) @ mean[..., None])[..., 0]
    if mean_difference is not None:
        shift = shift + (weight @ mean_difference[..., None])[..., 0]
    return shift.flatten()
