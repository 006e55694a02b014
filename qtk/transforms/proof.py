"""Rewrites a model group by group, and keeps what leaves the outputs on the example inputs as they were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from qtk.calls.calls import Call
from qtk.capture.prepared_model import REPORT, PreparedModel
from qtk.core.site import Site
from qtk.transforms.reference import OriginalOutputs
from qtk.transforms.result import GroupResult, Outcome, TransformResult
from qtk.transforms.snapshot import Snapshot, unchanged_on_error
from qtk.transforms.steps import Step, make


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
    """Makes the steps of all groups, except groups that change what the model computes on the example inputs.

    All groups are tried at once; if the function changes, each half is tried by itself, and so on down to the group. An
    exception leaves the model as it was.

    Args:
        model: a prepared model without quantizers; changed.
        call: the example inputs.
        groups: the groups in graph order; each may build on the groups before it.
        transform: name of the transform.
        nothing: what the result says if there are no groups.
    """
    with unchanged_on_error(model):
        proposed = [group for group in groups if group.steps]
        tried = _tried(model, OriginalOutputs(model, call), proposed, 0.0) if proposed else _Tried((), {}, 0.0)
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


def _tried(model: PreparedModel, reference: OriginalOutputs, groups: Sequence[Group], before: float) -> _Tried:
    """Makes the steps of the groups that keep the outputs; ``before``: how far they have moved already."""
    if not groups:
        return _Tried((), {}, before)
    snapshot = Snapshot(model)
    make(model, [step for group in groups for step in group.steps])
    difference, within = reference.compare(model)
    if within:
        return _Tried(tuple(groups), {}, difference)
    snapshot.restore()
    if len(groups) == 1:
        return _Tried((), {groups[0]: difference}, before)
    middle = len(groups) // 2
    first = _tried(model, reference, groups[:middle], before)
    second = _tried(model, reference, groups[middle:], first.difference)
    return _Tried(first.kept + second.kept, {**first.undone, **second.undone}, second.difference)
