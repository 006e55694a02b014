"""The zeros of a pruned weight, which layer-wise methods keep, and the 2:4 mask that a walk chooses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from qtk.algorithms.pruning import FOUR, prune_two_of_four
from qtk.errors import CalibrationError
from qtk.layerwise.candidates import shrinkage, with_prior
from qtk.layerwise.layer_state import LayerState
from qtk.layerwise.weighted_layers import WeightedLayer
from qtk.numerics.im2col import Geometry, weight_to_gemm

Sparsity: TypeAlias = Literal["2:4"]
"""A pattern of zeros: of four weights along the input axis two are 0."""

LISTED = 5
"""Layers that an error lists."""
KEPT_FROM = 0.3
"""Share of exact zeros from which a weight counts as pruned."""


def with_zeros(state: LayerState, sparsity: Sparsity | None) -> LayerState:
    """The state with the zeros that methods keep, with the zeros of a mask that is chosen here.

    Raises: CalibrationError if a mask is to be chosen and the damped Hessian has no inverse.
    """
    zeros, has_mask = zeros_of(state.geometry, state.float_weight, state.weight)
    if sparsity is None or has_mask or misfit(state.geometry, state.weight) is not None:
        return replace(state, zeros=zeros)
    error = with_prior(state, shrinkage(state.error.gram, state.moments.rows_of_groups)).error
    is_pruned, kept = prune_two_of_four(
        state.to_gemm(state.weight), error.gram[:, 0], _fours(state.geometry, state.weight),
        None if error.linear is None else error.linear[:, 0])
    weight = state.from_gemm(kept)
    return replace(state, weight=weight, pruned=weight, zeros=state.from_gemm(is_pruned.to(kept.dtype)) != 0)


def zeros_of(geometry: Geometry, float_weight: Tensor, weight: Tensor) -> tuple[Tensor | None, bool]:
    """The zeros that methods keep, of ``weight`` with a 2:4 mask, else of a pruned float weight; whether a mask exists.

    Shape: the zeros bool, as ``weight``; ``None`` if none are kept.
    """
    if _share_of_zeros(weight) >= 1 / 2 and misfit(geometry, weight) is None:
        fours = weight_to_gemm(weight == 0, geometry)[..., _fours(geometry, weight)]
        if bool((fours.sum(-1) >= FOUR // 2).all()):
            return weight == 0, True
    return float_weight == 0 if _share_of_zeros(float_weight) >= KEPT_FROM else None, False


def _share_of_zeros(weight: Tensor) -> float:
    return 1 - int(weight.count_nonzero()) / max(weight.numel(), 1)


def misfit(geometry: Geometry, weight: Tensor) -> str | None:
    """Says why no 2:4 mask fits a weight; ``None`` if one does."""
    if geometry.axes is not None and geometry.axes.stack:
        return "2:4 is a pattern of one matrix, this weight is a stack of them (experts)"
    if geometry.axes is None and geometry.groups > 1:
        return f"2:4 needs a convolution of one group, this has {geometry.groups}"
    columns = weight_to_gemm(weight, geometry).shape[-1] // geometry.kernel_positions
    if columns % FOUR:
        return f"2:4 needs an input axis that is a multiple of {FOUR}, this is {columns}"
    return None


def dense_layers(layers: Sequence[WeightedLayer], sparsity: Sparsity | None) -> dict[str, str]:
    """The layers that the pattern does not fit, each with the reason. Raises: CalibrationError if it fits none."""
    reasons = {layer.name: reason for layer in layers if sparsity is not None
               and (reason := misfit(layer.geometry, layer.weight)) is not None}
    if reasons and len(reasons) == len(layers):
        shown = "".join(f"\n  {name}: {reason}" for name, reason in list(reasons.items())[:LISTED])
        raise CalibrationError(f"LayerwiseOptions(sparsity={sparsity!r}) fits none of the {len(layers)} layers; leave "
                               f"it out, or name other sites:{shown}")
    return reasons


def _fours(geometry: Geometry, weight: Tensor) -> Tensor:
    """The columns of every four: input channels that follow one another, at one position of the kernel."""
    index = torch.arange(weight_to_gemm(weight, geometry).shape[-1], device=weight.device)
    return index.reshape(-1, FOUR, geometry.kernel_positions).transpose(1, 2).reshape(-1, FOUR)
