"""Rewrites a model group by group, and keeps what leaves the outputs on the example inputs as they were."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from qtk.capture.calls import Call, detached
from qtk.capture.prepared_model import REPORT, PreparedModel
from qtk.capture.verify_prepared import eval_outcome
from qtk.core.site import Site
from qtk.torch_private import pytree
from qtk.transforms.result import GroupResult, Outcome, TransformResult
from qtk.transforms.snapshot import Snapshot, unchanged_on_error
from qtk.transforms.steps import Step, make

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Dtype of an output → largest change accepted, relative to its largest value."""


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Steps that are made together or not at all.

    Args:
        name: for reports.
        steps: the steps, in order; empty: the group is left as it is.
        detail: where the factors go, or why the group is left.
        sites: of the values that the steps change.
        before: error of the quantized output without the steps; ``None`` if not measured.
        after: the same with them.
    """

    name: str
    steps: tuple[Step, ...]
    detail: str
    sites: tuple[Site, ...] = ()
    before: float | None = None
    after: float | None = None


def rewrite(
    model: PreparedModel, call: Call, groups: Sequence[Group], *, transform: str, nothing: str
) -> TransformResult:
    """Makes the steps of all groups, except those that change an output by more than ``TOLERANCE``.

    All groups are tried at once; if the outputs change, each half is tried by itself, and so on down to the group. An
    exception leaves the model as it was.

    Args:
        model: a prepared model without quantizers; changed.
        call: the example inputs.
        groups: the groups in graph order; they may build on those before.
        transform: name of the transform.
        nothing: what the result says if there are no groups.
    """
    with unchanged_on_error(model):
        proposed = [group for group in groups if group.steps]
        reference = _outputs(model, call) if proposed else []
        tried = _tried(model, call, reference, proposed, 0.0)
    results = []
    for group in groups:
        if group in tried.undone:
            detail = f"the outputs on the example inputs changed by {tried.undone[group]:.1e}"
            results.append(GroupResult(group.name, Outcome.UNDONE, detail))
        else:
            outcome = Outcome.APPLIED if group.steps else Outcome.SKIPPED
            results.append(GroupResult(group.name, outcome, group.detail, group.before, group.after))
    sites = dict.fromkeys(site for group in tried.kept for site in group.sites)
    result = TransformResult(transform, tuple(results), tuple(sites), tried.difference, nothing)
    report = model.report
    model.meta[REPORT] = replace(report, transforms=(*report.transforms, result.summary))
    return result


@dataclass(frozen=True, slots=True)
class _Tried:
    """Which of some groups were made, which undone, and how far the outputs have moved by all groups made so far."""

    kept: tuple[Group, ...]
    undone: Mapping[Group, float]
    difference: float


def _tried(model: PreparedModel, call: Call, reference: list[Any], groups: Sequence[Group], before: float) -> _Tried:
    """Makes the steps of those groups that keep the outputs; ``before``: how far they have moved already."""
    if not groups:
        return _Tried((), {}, before)
    snapshot = Snapshot(model)
    make(model, [step for group in groups for step in group.steps])
    difference, within = change(reference, _outputs(model, call))
    if within:
        return _Tried(tuple(groups), {}, difference)
    snapshot.restore()
    if len(groups) == 1:
        return _Tried((), {groups[0]: difference}, before)
    middle = len(groups) // 2
    first = _tried(model, call, reference, groups[:middle], before)
    second = _tried(model, call, reference, groups[middle:], first.difference)
    return _Tried(first.kept + second.kept, {**first.undone, **second.undone}, second.difference)


def _outputs(model: PreparedModel, call: Call) -> list[Any]:
    """The leaves of the model's output in eval mode, with a fixed seed."""
    output, _ = eval_outcome(model, *detached((call.args, call.kwargs)))
    return pytree.tree_leaves(output)


def change(before: Sequence[object], after: Sequence[object]) -> tuple[float, bool]:
    """Largest relative change of the float tensors among the outputs, and whether all are within ``TOLERANCE``.

    A different number or shape of outputs, and a number that became NaN or infinite, count as an infinite change.
    """
    worst, within = 0.0, len(before) == len(after)
    for a, b in zip(before, after, strict=False):
        if not isinstance(a, Tensor) or not isinstance(b, Tensor) or not a.is_floating_point():
            continue
        difference = _relative(a, b)
        worst = max(worst, difference)
        within = within and difference <= TOLERANCE[a.dtype]
    return (worst if len(before) == len(after) else math.inf), within


def _relative(a: Tensor, b: Tensor) -> float:
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
