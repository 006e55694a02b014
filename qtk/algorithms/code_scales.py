"""The scales of least output error for given codes, in closed form.

For codes c, all with one scale s, the error of ``ŵ = s c`` is a parabola in s with its minimum at

    s + c·g / cᵀ H c        g = linear + H d, d = w - ŵ

summed over the outputs that share the scale. Blocks of columns with scales of their own follow one after the other.
Where a whole row shares a scale, ``H c = (H w - (g - linear)) / s``, in which H w is the same for all codes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qtk.algorithms.output_error import OutputError


def code_scales(
    codes: Tensor, scales: Tensor, scale_index: Tensor, error: OutputError, half_gradient: Tensor, *, block: int,
    product: Tensor | None = None,
) -> Tensor:
    """The scales of given codes with which the error of the output is least; none becomes 0 or less.

    Args:
        codes: less their zero points, in the dtype to compute in.
        scales: the present scales.
        scale_index: index of the scale of every weight.
        error: of the layer's output, with the Gram matrix of all columns.
        half_gradient: of the error with the present scales; becomes that with the result.
        block: number of consecutive columns that share a scale.
        product: of the float weights with the Gram matrix, which saves one where ``block`` is all columns.

    Shape: ``codes``, ``scale_index``, ``half_gradient`` and ``product`` [groups, outputs, columns]; ``scales`` and
    result [scales].

    >>> weight, codes, error = torch.tensor([1.0, 2.2]), torch.tensor([1.0, 2.0]), OutputError(torch.eye(2)[None, None])
    >>> half_gradient = (weight - codes)[None, None]
    >>> code_scales(codes[None, None], torch.ones(1), torch.zeros(1, 1, 2).long(), error, half_gradient, block=2)
    tensor([1.0800])
    """
    gram, found = error.gram[:, 0], scales.to(codes.dtype, copy=True)
    for begin in range(0, codes.shape[2], block):
        columns = slice(begin, begin + block)
        index, code = scale_index[..., begin].flatten(), codes[..., columns]
        if product is not None and block == codes.shape[2]:
            term = half_gradient if error.linear is None else half_gradient - error.linear[:, 0]
            moving = (product - term) / found[scale_index[..., :1]]
        else:
            moving = code @ gram[:, columns, columns]
        gain, curvature = (
            torch.zeros_like(found).index_add_(0, index, (code * factor).sum(-1).flatten())
            for factor in (half_gradient[..., columns], moving)
        )
        moved = (found + torch.where(curvature > 0, gain / curvature, 0.0)).to(scales.dtype).to(found.dtype)
        moved = torch.where((moved > 0) & moved.isfinite() & (curvature > 0), moved, found)
        by = (moved - found)[index].reshape(*code.shape[:2], 1)
        if block == codes.shape[2]:
            half_gradient.addcmul_(moving, by, value=-1)
        else:
            half_gradient.baddbmm_(code * by, gram[:, columns], alpha=-1)
        found = moved
    return found.to(scales.dtype)
