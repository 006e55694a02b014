"""Treats the matrices of a stack as layers of their own: each has the candidates that its own rows choose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from qtk.algorithms.output_error import OutputError
from qtk.core.encoding import Encoding
from qtk.layerwise.candidates import Winner, choose
from qtk.layerwise.layer_state import LayerState
from qtk.layerwise.methods import LayerwiseMethod


def choose_each(start: LayerState, methods: Sequence[LayerwiseMethod]) -> Winner:
    """The best candidate for each matrix, joined; for all together where they share scales, or are one.

    Raises: CalibrationError if a method fails.
    """
    if start.moments.counts is None or start.geometry.groups == 1 or not _has_own_scales(start):
        return choose(start, methods)
    winners = [choose(state, methods) for state in _states(start)]
    pairs = [winner.held_out for winner in winners if winner.held_out is not None]
    held_out = (sum(before for before, _ in pairs), sum(after for _, after in pairs)) if pairs else None
    (name, times), *others = Counter(winner.name for winner in winners).most_common()
    shown = f"{name} ({times} of {len(winners)})" if others else name
    return Winner(
        _joined(start, [winner.state for winner in winners]), shown,
        sum(winner.before for winner in winners), sum(winner.after for winner in winners), held_out,
    )


def _has_own_scales(state: LayerState) -> bool:
    """Says whether no two matrices share a scale."""
    axes, scale, shape = state.geometry.axes, state.encoding.scale, state.weight.shape
    return axes is not None and scale.ndim == len(shape) and state.encoding.spec.scale_format is None and all(
        scale.shape[axis] == shape[axis] for axis in axes.separate
    )


def _states(start: LayerState) -> Iterator[LayerState]:
    """The state of each matrix."""
    axes, encoding = start.geometry.axes, start.encoding
    assert axes is not None
    zero_points = None if encoding.zero_point is None else list(axes.matrices(encoding.zero_point))
    zeros, pruned = (None if each is None else list(axes.matrices(each)) for each in (start.zeros, start.pruned))
    parts = zip(axes.matrices(start.float_weight), axes.matrices(start.weight), axes.matrices(encoding.scale),
                strict=True)
    for index, (float_weight, weight, scale) in enumerate(parts):
        unrounded = float_weight if pruned is None else pruned[index]
        gram, linear = start.error.gram[index:index + 1], start.error.linear
        float_bias = None if start.float_bias is None else start.float_bias[index]
        yield replace(
            start, geometry=replace(start.geometry, groups=1, axes=axes.of_one), float_weight=float_weight,
            weight=weight if start.is_rounded else unrounded, pruned=None if pruned is None else unrounded,
            zeros=None if zeros is None else zeros[index],
            encoding=Encoding(encoding.spec, scale, None if zero_points is None else zero_points[index]),
            bias=float_bias if start.bias is start.float_bias or start.bias is None else start.bias[index],
            float_bias=float_bias, moments=start.moments.of_matrix(index),
            error=OutputError(gram, None if linear is None else linear[index:index + 1]),
        )


def _joined(start: LayerState, states: Sequence[LayerState]) -> LayerState:
    """Joins ``states``, one for each matrix, to the state of the stack."""
    axes, encoding = start.geometry.axes, start.encoding
    assert axes is not None

    def joined(tensor: Tensor, parts: Sequence[Tensor]) -> Tensor:
        result = tensor.clone()
        for view, part in zip(axes.matrices(result), parts, strict=True):
            view.copy_(part)
        return result

    changed = any(state.weight is not state.float_weight for state in states)
    zero_points = [state.encoding.zero_point for state in states]
    biases = [state.bias for state in states if state.bias is not None]
    corrected = any(state.bias is not state.float_bias for state in states)
    return replace(
        start, weight=joined(start.weight, [state.weight for state in states]) if changed else start.weight,
        bias=torch.stack(biases) if corrected else start.bias, encoding=Encoding(
            encoding.spec, joined(encoding.scale, [state.encoding.scale for state in states]),
            None if encoding.zero_point is None else
            joined(encoding.zero_point, [each for each in zero_points if each is not None]),
        ),
    )
