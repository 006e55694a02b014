"""What a model computes on its example inputs before it is rewritten, to compare with afterwards."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property

import torch
from torch import Tensor

from qtk.calls.calls import Call, detached
from qtk.capture.free_axes import at_most_rows
from qtk.capture.prepared_model import PreparedGraph, PreparedModel
from qtk.capture.verify_prepared import eval_outcome
from qtk.torch_private import pytree
from qtk.transforms.steps import Step, make, steps_of

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Dtype of an output → largest change accepted, relative to its largest value."""

ROUNDING = 10.0
"""A rewrite may be this many times as far from float64 as the original: which way the rounding errors of an
ill-conditioned model fall changes from input to input by almost as much."""

MOST_ROWS = 2
"""The rows of an example that are compared, all if they differ: few can agree, not tell how far rounding goes."""


class OriginalOutputs:
    """The outputs of a model in eval mode with a fixed seed, and the same in float64 if they are asked for.

    Args:
        model: the model before it is rewritten in steps, which replace its parameters and do not write to them.
        call: the example inputs, of which the first ``MOST_ROWS`` rows are taken if the model runs on them; all where
            these differ. The model's examples of other kinds of calls are added.
    """

    def __init__(self, model: PreparedModel, call: Call) -> None:
        tensors = itertools.chain(model.parameters(), model.buffers())
        self._original = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
        self._calls = self._whole = [call, *model.examples[1:]]
        with suppress(Exception):  # of a model that takes no other batch
            few = at_most_rows(model, call, MOST_ROWS) if isinstance(model, PreparedGraph) else call
            if few is not call:
                calls = [few, *self._whole[1:]]
                self._outputs, self._calls = _outputs(model, calls), calls
                return
        self._outputs = _outputs(model, self._calls)

    def compare(self, model: PreparedModel) -> tuple[float, bool]:
        """Largest relative change of the outputs, and whether ``model``, the model rewritten, computes the same.

        It does if the outputs moved by at most ``TOLERANCE``. If they moved further, float64 decides: made there, the
        steps must keep the outputs; in the dtype of the model these may be at most ``ROUNDING`` times as far from
        float64 as before.
        """
        outputs = _outputs(model, self._calls)
        difference, within = change(self._outputs, outputs)
        if not within and self._calls is not self._whole:
            self._calls, self._outputs = self._whole, _outputs(self._original, self._whole)
            return self.compare(model)
        return difference, within or (math.isfinite(difference) and self._is_rounding(outputs, model))

    def _is_rounding(self, outputs: list[object], model: PreparedModel) -> bool:
        exact = self._exact
        rewritten = self._exact_outputs(steps_of(model)[len(steps_of(self._original)) :])
        if exact is None or rewritten is None or not change(exact, rewritten)[1]:
            return False
        return all(
            change([true], [after])[0] <= ROUNDING * change([true], [before])[0]
            for true, before, after in zip(exact, self._outputs, outputs, strict=True)
            if not isinstance(true, Tensor) or true.is_floating_point() or true.is_complex()  # integers flip at ties
        )

    @cached_property
    def _exact(self) -> list[object] | None:
        return self._exact_outputs(())

    def _exact_outputs(self, steps: Sequence[Step]) -> list[object] | None:
        """The outputs in float64 after ``steps``; ``None`` if the device, an op or the memory does not allow it."""
        calls: list[Call] = []
        for call in self._calls:
            args, kwargs = pytree.tree_map(
                lambda leaf: leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf,
                (call.args, call.kwargs),
            )
            calls.append(Call(args, kwargs, None))
        try:
            model = copy.deepcopy(self._original).double()
            make(model, steps)
            return _outputs(model, calls)
        except (RuntimeError, TypeError):  # of torch; the second where a device has no float64
            return None


def change(before: Sequence[object], after: Sequence[object]) -> tuple[float, bool]:
    """Largest relative change of the tensors among the outputs, and whether all are within ``TOLERANCE``.

    A different number or shape of outputs, and a number that became NaN or infinite, count as an infinite change.
    Complex outputs are compared as their parts; of integers, such as an argmax, the share that differs counts, and none
    may.
    """
    worst, within = 0.0, len(before) == len(after)
    for a, b in zip(before, after, strict=False):
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            continue
        if a.is_complex() and b.is_complex():
            a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
        if not a.is_floating_point():
            differing = _share_differing(a, b)
            worst, within = max(worst, differing), within and differing == 0
            continue
        difference = _relative(a, b)
        worst = max(worst, difference)
        within = within and difference <= TOLERANCE[a.dtype]
    return (worst if len(before) == len(after) else math.inf), within


def _outputs(model: PreparedModel, calls: Sequence[Call]) -> list[object]:
    """The leaves of the outputs."""
    outputs = [eval_outcome(model, *detached((call.args, call.kwargs))).output for call in calls]
    return pytree.tree_leaves(outputs)


def _share_differing(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return math.inf
    return float((a != b).double().mean()) if a.numel() and not a.is_meta else 0.0


def _relative(a: Tensor, b: Tensor) -> float:
    """Largest difference, relative to the largest finite value of ``a``."""
    if a.shape != b.shape:
        return math.inf
    if a.numel() == 0 or a.is_meta:  # a meta tensor has no values to change
        return 0.0
    a, b = a.double(), b.double()
    same = (a == b) | (a.isnan() & b.isnan())
    gap = float(torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=math.inf, posinf=math.inf).max())
    finite = a[a.isfinite()].abs()
    size = float(finite.max()) if finite.numel() else 0.0
    return gap / size if size else (math.inf if gap else 0.0)
