"""Keeps batch norms live behind layers that are planned and quantized as they will be folded, and folds them at last.

Where a batch norm alone reads a layer, at once or reordered, and all uses of the layer's weight are followed by it,
weight and bias are computed in the graph as folding will make them, and are what quantizers see:
``qtk.nn.kept_batch_norm``. A plan is made of the folded model, so that simulation and export have the same sites. Other
batch norms are operators of their own, in training and in files.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

import torch
from torch import nn

from qtk.calls.calls import Call
from qtk.capture.prepared_model import PreparedModel
from qtk.core.site import Site
from qtk.graph.graphs import graphs
from qtk.graph.insert import insert, remove
from qtk.graph.simulation import Simulation
from qtk.graph.sites import value_site
from qtk.operators.targets import kept_batch_norm_called
from qtk.transforms.fold_batch_norm_step import FoldBatchNorm, Into, owner_of
from qtk.transforms.fold_batch_norms import fold_batch_norms, folded_sites, unread
from qtk.transforms.foldable_batch_norms import foldable_batch_norms
from qtk.transforms.graph_editor import beside
from qtk.transforms.keep_batch_norm_step import FoldKeptBatchNorm, KeepBatchNorm, movement_behind
from qtk.transforms.named_tensors import NamedTensors
from qtk.transforms.proof import Group, rewrite
from qtk.transforms.result import GroupResult, Outcome, TransformResult
from qtk.transforms.snapshot import Snapshot, unchanged_on_error
from qtk.transforms.steps import RemoveParameters, is_transformed, make, steps_of

BATCH_NORM = "batch_norm"
"""The kind of op that a model must have, or there is nothing to settle."""


def keep_batch_norms(model: PreparedModel, call: Call) -> TransformResult:
    """Keeps every batch norm that can be folded into the layer before it, each proved on the example inputs.

    Changes ``model``, a prepared model without quantizers; no parameter changes.

    Args:
        model: the model.
        call: the example inputs.
    """
    groups = [_keeping(model, group) for group in foldable_batch_norms(model)]
    return rewrite(model, call, groups, transform="keep_batch_norms", nothing="the model has no batch norm to keep")


def settle_batch_norms(model: PreparedModel, call: Call, how: bool | Literal["at_export"]) -> None:
    """Folds, keeps or leaves the batch norms, as ``fold_batch_norms`` of a config says. Changes ``model``.

    A model that transforms have rewritten stays as it is.
    """
    if is_transformed(model) or not how:
        return
    (keep_batch_norms if how == "at_export" else fold_batch_norms)(model, call)


def fold_kept(simulation: Simulation) -> tuple[Simulation, TransformResult]:
    """Folds the batch norms that are kept; sites, encodings and, in eval mode, the function stay bit for bit.

    Changes the model of ``simulation``.

    Returns: the simulation then, and what was done.
    """
    model = simulation.model
    assert isinstance(model, PreparedModel)
    with unchanged_on_error(model):
        remove(model)
        folds = _fold(model)
        quantizers = insert(model, simulation.plan, known=simulation.quantizers)
    groups = tuple(
        GroupResult(owner_of(fold.mean), Outcome.APPLIED, f"into {owner_of(fold.layers[0].weight)}") for fold in folds
    )
    nothing = "no batch norm is kept"
    return replace(simulation, quantizers=quantizers), TransformResult("fold_batch_norms", groups, nothing=nothing)


@contextmanager
def folded(simulation: Simulation) -> Iterator[Simulation]:
    """The simulation with its kept batch norms folded while the body runs."""
    if not is_kept(simulation.model):
        yield simulation
        return
    snapshot = Snapshot(simulation.model)
    try:
        yield fold_kept(simulation)[0]
    finally:
        snapshot.restore()


@contextmanager
def as_folded(model: PreparedModel) -> Iterator[dict[Site, str]]:
    """Folds the kept batch norms of a prepared model without quantizers while the body runs, for plans.

    Yields: see ``folded_sites``.
    """
    if not is_kept(model):
        yield folded_sites(model)
        return
    snapshot = Snapshot(model)
    try:
        _fold(model)
        yield folded_sites(model)
    finally:
        snapshot.restore()


def is_kept(model: nn.Module) -> bool:
    """Says whether a batch norm of the model is kept."""
    return any(kept_batch_norm_called(node) is not None for graph in graphs(model).values()
               for node in graph.graph.nodes)


def _keeping(model: PreparedModel, group: Group) -> Group:
    """The group that keeps what ``group`` would fold into the layer before; without steps, if it would not."""
    (fold,) = group.steps or (None,)
    if not isinstance(fold, FoldBatchNorm):
        return group
    if fold.into is not Into.PRODUCER:
        return replace(group, steps=(), detail=f"stays an operator: {group.detail}", sites=())
    nodes = [node for graph in graphs(model).values() for node in graph.graph.nodes if node.op == "call_function"]
    if any(movement_behind(node) is None for node in nodes if value_site(node) in group.sites):
        return replace(group, steps=(), sites=(), detail="stays an operator: an op that drops or repeats values stands "
                                                         f"between it and {owner_of(fold.layers[0].weight)}")
    (layer,) = fold.layers
    step = KeepBatchNorm(layer, fold.weight, fold.bias, fold.mean, fold.var, fold.calls, group.sites)
    return replace(group, steps=(step,), detail=f"kept, {owner_of(layer.weight)} is quantized as folded")


def _fold(model: PreparedModel) -> list[FoldKeptBatchNorm]:
    """Folds what is kept, and removes its parameters. Changes ``model``, which has no quantizers."""
    eps = {
        value_site(node): float(module.eps)  # type: ignore[arg-type]
        for graph in graphs(model).values() for node in graph.graph.nodes
        if (module := kept_batch_norm_called(node)) is not None
    }
    members = NamedTensors(model)

    def fold(step: KeepBatchNorm) -> FoldKeptBatchNorm:
        like = members.tensor(step.mean)
        output_mean = torch.zeros_like(like) if step.norm_bias is None else members.tensor(step.norm_bias).detach()
        output_std = torch.ones_like(like) if step.norm_weight is None else members.tensor(step.norm_weight).detach()
        return FoldKeptBatchNorm(
            step.calls, Into.PRODUCER, (step.layer,), step.norm_weight, step.norm_bias, step.mean, step.var,
            eps[step.ops[0]], beside(step.mean, "scale"), beside(step.mean, "shift"), output_mean, output_std.abs(),
            step.ops,
        )

    folds = [fold(step) for step in steps_of(model) if isinstance(step, KeepBatchNorm)]
    make(model, folds)
    names = unread(model, folds)
    make(model, [RemoveParameters(names)] if names else [])
    return folds
