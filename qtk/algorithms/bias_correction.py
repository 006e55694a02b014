"""Bias correction: removes the shift that quantization gives to the mean of a layer's output.

Nagel et al., arXiv 1906.04721, section 4.2, with measured means:

    correction = E[X w - X̂ ŵ] = (w - ŵ)·E[X̂] + w·E[X - X̂]

X is the layer's input in the float model, X̂ the layer's input in the quantized model.
"""

from __future__ import annotations

from torch import Tensor


def bias_correction(weight: Tensor, rounded: Tensor, mean: Tensor, mean_difference: Tensor | None) -> Tensor:
    """The correction to add to the bias: the mean of ``X w - X̂ ŵ`` over rows.

    Shape: ``weight`` w and ``rounded`` ŵ [groups, outputs, columns]; ``mean`` of X̂ and ``mean_difference`` of X - X̂
    [groups, columns], ``None`` for 0; result [groups · outputs].

    >>> import torch
    >>> weight, rounded = torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[1.0, 1.5]]])
    >>> bias_correction(weight, rounded, torch.tensor([[3.0, 4.0]]), None)
    tensor([2.])
    """
    shift = ((weight - rounded) @ mean[..., None])[..., 0]
    if mean_difference is not None:
        shift = shift + (weight @ mean_difference[..., None])[..., 0]
    return shift.flatten()
