"""Tries candidates for the update of a layer; the candidate with the least error on held-out data is taken.

With a prior, methods see the Gram matrix ``H + prior · mean(diag H) I``: as if that part of the data were noise of
equal power in all columns. The stronger it is, the less they rely on what only these data have. The prior is at least
the shrinkage of Chen et al., arXiv 0907.4698, equation 23 (OAS, Ledoit and Wolf's for normal data), and more where no
data reach many directions (``unreached``): held-out data of the same kind do not reach them either. Stronger ones are
tried as long as the error on held-out data falls, in a rehearsal on some of the outputs where these are found one by
one, in which long methods stop earlier. If no prior lowers it, each method is tried alone; if that gains nothing
either, the layer stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from qtk.algorithms.cholesky import cholesky
from qtk.algorithms.output_error import OutputError, in_blocks
from qtk.layerwise.layer_state import LayerState
from qtk.layerwise.methods import LayerwiseMethod
from qtk.moments.second_moments import SecondMoments

PRIORS = 0.0, 0.01, 0.03, 0.1, 0.3
"""Strengths of the prior that are tried, above the least one."""
MAX_PRIOR = 1e3
"""Upper bound of the prior, beyond which it alone decides."""
UNREACHED_POWER = 1e-4
"""The power, as a multiple of the mean, below which data hardly reach a direction."""
UNREACHED_PRIOR = 0.01
"""The prior where data reach half of the directions."""
UNREACHED_SHARE = 0.02
"""The share of directions that needs no prior: rounding may leave as many where all data reach every direction."""
OUTPUT_STRIDE = 8
"""The prior is chosen on every 8th output: outputs are solved independently."""
MIN_OUTPUTS = 64
"""Outputs by which the prior is chosen, if there are as many."""
NONE = "none"
"""The winner where no method lowers the held-out error."""


@dataclass(frozen=True, slots=True, eq=False)
class Winner:
    """The candidate that is taken.

    Args:
        state: of the layer.
        name: of the candidate: its methods and prior.
        before: squared error of the output before, over all data, without its constant.
        after: the same afterwards.
        held_out: the errors before and after over held-out data; ``None`` if there are none.
    """

    state: LayerState
    name: str
    before: float
    after: float
    held_out: tuple[float, float] | None


def choose(start: LayerState, methods: Sequence[LayerwiseMethod]) -> Winner:
    """The best candidate for a layer. Raises: CalibrationError if a method fails."""
    moments, held_out = start.moments, start.moments.held_out
    if not moments.required.gram:
        state = _applied(start, methods)
        before, after = state.loss or (0.0, 0.0)
        return Winner(state, _name(methods), before, after, None)
    floor = least_prior(start.error.gram, moments.rows_of_groups)
    if held_out is None or not held_out.rows:
        state, own = _applied(with_prior(start, floor), methods), _Judge(start, moments, start.error)
        return Winner(state, _name(methods), own.error(start), own.error(state), None)
    own = _Judge(start, moments, start.error)
    judge = own.over(held_out)
    least = judge.error(start)
    best, gain, name = start, 0.0, NONE
    priors: Sequence[float] = PRIORS
    known: dict[float, OutputError] = {}
    every = min(OUTPUT_STRIDE, len(start.weight) // MIN_OUTPUTS)
    some = slice(None, None, every)
    if every > 1 and (rehearsed := start.of_outputs(some)) is not None:
        few = judge.of_outputs(some, rehearsed)
        for prior, rehearsal, _ in _better(rehearsed, few, few.error(rehearsed), methods, floor, PRIORS):
            known = {prior: rehearsal.error}
        priors = tuple(known)
    for prior, best, gain in _better(start, judge, least, methods, floor, priors, known):  # noqa: B007  the last is best
        name = f"{_name(methods)}, prior {prior or 'least'}"
    if best is start and len(methods) > 1:
        for method in methods:
            state = _applied(with_prior(start, floor.clamp(min=PRIORS[-1])), [method])
            if (own_gain := least - judge.error(state)) > gain:
                best, gain, name = state, own_gain, f"{_name([method])}, prior {PRIORS[-1]}"
    errors = least, least - gain
    before, after = (own.error(state) + error for state, error in zip((start, best), errors, strict=True))
    return Winner(best, name, before, after, errors)


def _better(
    start: LayerState, judge: _Judge, least: float, methods: Sequence[LayerwiseMethod], floor: Tensor,
    priors: Sequence[float], known: Mapping[float, OutputError] = MappingProxyType({}),
) -> Iterator[tuple[float, LayerState, float]]:
    """Prior, result and gain over ``least``, each better than the last, as long as the held-out error falls.

    ``known``: errors of some outputs with these priors, of which Gram matrix and factors are taken.
    """
    gain = 0.0
    for prior in priors:
        if prior and bool((floor >= prior).all()):
            continue
        if (same := known.get(prior)) is not None:
            state = replace(start, error=replace(same, linear=start.error.linear))
        else:
            state = with_prior(start, floor.clamp(min=prior))
        state = _applied(state, methods)
        if (own_gain := least - judge.error(state)) > gain:
            gain = own_gain
            yield prior, state, gain
        elif gain > 0:
            return


def least_prior(gram: Tensor, rows: int | Tensor) -> Tensor:
    """The weakest prior that is tried. Shape: as ``shrinkage``."""
    share = (unreached(gram) - UNREACHED_SHARE).clamp(min=0)
    return shrinkage(gram, rows) + UNREACHED_PRIOR * share / (1 - share)


def shrinkage(gram: Tensor, rows: int | Tensor) -> Tensor:
    """The prior that shrinks ``gram``, of ``rows`` rows, to the least expected squared error, for normal data.

    Shape: ``gram`` [groups, blocks, block, block]; ``rows`` one number or [groups, 1]; result [groups, blocks].

    >>> x = torch.randn(100, 3, generator=torch.Generator().manual_seed(0)) @ torch.tensor([[3.0, 1, 0], [0, 1, 1],
    ...     [0, 0, 1]])
    >>> few, many = (shrinkage((x[:rows].mT @ x[:rows])[None, None], rows).item() for rows in (3, 100))
    >>> few > many > 0
    True
    """
    columns, power = gram.shape[-1], gram.square().sum((-2, -1))
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1).square()
    numerator = (1 - 2 / columns) * power + trace
    if isinstance(rows, Tensor):
        rows = rows.to(gram)
    denominator = (rows + 1 - 2 / columns) * (power - trace / columns)
    intensity = (numerator / denominator.clamp(min=torch.finfo(gram.dtype).tiny)).clamp(0, 1)
    return (intensity / (1 - intensity)).nan_to_num().clamp(max=MAX_PRIOR)


def unreached(gram: Tensor) -> Tensor:
    """A lower bound of the share of directions that the data hardly reach, smooth in the Gram matrix.

    With ``H + ε mean(diag H) I = L Lᵀ`` and ε = UNREACHED_POWER, ``L_ii²`` is what the columns before leave of column
    i: ``ε mean(diag H)`` if they determine it, never less. The result is the mean of ``ε mean(diag H) / L_ii²``, at
    most the mean of ``ε mean(diag H) / (λ + ε mean(diag H))`` over the eigenvalues λ of H. Columns that are always 0
    are left out: a prior changes neither what they are rounded to, nor the others.

    Shape: ``gram`` [groups, blocks, block, block]; result [groups, blocks], at least 0 and below 1.

    >>> x = torch.randn(100, 1, generator=torch.Generator().manual_seed(0)) @ torch.tensor([[1.0, 2.0, 0.0, 3.0]])
    >>> round(unreached((x.mT @ x)[None, None]).item(), 2)  # of 2 / 3 of the columns that are not 0
    0.19
    """
    flat = gram.flatten(0, 1)
    diagonal = flat.diagonal(dim1=-2, dim2=-1)
    is_alive, least = diagonal > 0, UNREACHED_POWER * diagonal.mean(-1, keepdim=True)
    diagonal = diagonal + least
    factor, failed = cholesky(flat.diagonal_scatter(diagonal, dim1=-2, dim2=-1))
    if bool(failed.any()):
        factor = cholesky(flat.diagonal_scatter(diagonal, dim1=-2, dim2=-1).to(torch.float64))[0].to(gram.dtype)
    share = (least / factor.diagonal(dim1=-2, dim2=-1).square()).clamp(max=1) * is_alive
    share = (share.sum(-1) / is_alive.sum(-1).clamp(min=1)).nan_to_num()
    return share.clamp(max=1 - 1 / gram.shape[-1]).reshape(gram.shape[:2])


class _Judge:
    """Squared error of a layer's output over some data, without its constant."""

    def __init__(self, start: LayerState, moments: SecondMoments, error: OutputError) -> None:
        self._start = start
        self._moments = moments
        self._weight = start.to_gemm(start.float_weight)
        self._error = error

    def over(self, moments: SecondMoments) -> _Judge:
        """The judge over other data, of which ``moments`` are the statistics."""
        gram, linear = moments.gram_as(self._start.dtype), moments.linear(self._weight)
        judge = copy(self)
        judge._moments = moments
        judge._error = OutputError(gram, None if linear is None else in_blocks(linear, gram.shape[1]))
        return judge

    def of_outputs(self, outputs: slice, start: LayerState) -> _Judge:
        """The judge of some outputs alone, of which ``start`` is the state."""
        judge = copy(self)
        judge._start, judge._weight = start, self._weight[:, outputs]
        judge._error = self._error.select(slice(None), outputs)
        return judge

    def error(self, state: LayerState) -> float:
        change = self._weight - state.to_gemm(state.simulated_weight())
        error = float(self._error.of(in_blocks(change, self._error.blocks)).sum(dtype=torch.float64))
        float_bias = self._start.float_bias
        if state.bias is None or float_bias is None or state.bias is float_bias:
            return error
        moments, shift = self._moments, (state.bias - float_bias).to(torch.float64).reshape(change.shape[:2])
        mean = (change.to(torch.float64) @ moments.mean[..., None])[..., 0]
        if moments.mean_difference is not None:
            mean = mean + (self._weight.to(torch.float64) @ moments.mean_difference[..., None])[..., 0]
        return error + float((moments.rows_of_means * (shift.square() - 2 * shift * mean)).sum())


def with_prior(state: LayerState, prior: Tensor) -> LayerState:
    """The state with a prior on its Gram matrix. Shape: ``prior`` [groups, blocks]."""
    gram = state.error.gram.clone()
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    diagonal += (prior * diagonal.mean(-1))[..., None]
    return replace(state, error=OutputError(gram, state.error.linear))


def _applied(state: LayerState, methods: Sequence[LayerwiseMethod]) -> LayerState:
    for method in methods:
        state = method.apply(state)
    return state


def _name(methods: Sequence[LayerwiseMethod]) -> str:
    return " + ".join(type(method).__name__ for method in methods)
