"""``reestimate_batch_norms``: statistics of batch norms from the quantized forward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, fx, nn

from qtk.core.granularity import PerChannel
from qtk.core.site import Site
from qtk.data.forward_pass import Data, Forward, run_all
from qtk.data.valid_tokens import Valid, ValidTokens
from qtk.errors import CalibrationError, NotCalibratedError
from qtk.graph.captured_graph import CapturedGraph
from qtk.graph.graphs import graphs
from qtk.graph.insert import quantizer_nodes
from qtk.graph.simulation import HasSimulation, Simulation
from qtk.graph.sites import OWNER, label
from qtk.nn.batch_norm import BatchNorm
from qtk.nn.kept_batch_norm import by_channels
from qtk.operators.targets import attribute, batch_norm_called, kept_batch_norm_called
from qtk.public import public
from qtk.quantizers.quantizer import Quantizer
from qtk.torch_private import BatchNormBase
from qtk.transforms.keep_batch_norm_step import unfolded_targets, weight_quantizer
from qtk.transforms.result import GroupResult, Outcome, TransformResult


@dataclass(frozen=True, slots=True, eq=False)
class _Norm:
    """A batch norm with running statistics, as one call of the graph reads them."""

    name: str
    graph: CapturedGraph
    node: fx.Node
    module: BatchNorm | BatchNormBase
    mean: Tensor
    var: Tensor

    @property
    def read(self) -> fx.Node:
        """The node whose value it normalises."""
        return self.node.all_input_nodes[0]


@public
def reestimate_batch_norms(
    sim: HasSimulation, data: Data, *, forward: Forward | None = None, num_batches: int | None = None,
    progress: bool = True, valid: Valid | None = None,
) -> TransformResult:
    """Replaces the running statistics of batch norms by the statistics of the quantized forward pass.

    After training with quantized weights the statistics belong to other weights. Each becomes the average of the
    batches' means and variances, every batch norm normalising by its batch meanwhile, as in training. This changes the
    function. A simulation whose batch norms are folded has none: plan it with ``fold_batch_norms: at_export``.

    >>> import qtk, torch
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
    >>> batches = [torch.randn(8, 3, 8, 8) for _ in range(4)]
    >>> sim = qtk.QuantSim(model, batches[0], config={"version": 1, "fold_batch_norms": "at_export"})
    >>> sim.compute_encodings(batches, progress=False)
    >>> print(qtk.reestimate_batch_norms(sim, batches, progress=False))  # doctest: +ELLIPSIS
    reestimate_batch_norms: 1 applied
      1  applied: mean moved by ... standard deviations, variance times ... on average

    Encodings of the values behind them are forgotten, unless they are frozen. A weight that is quantized as folded
    keeps its codes: its scales follow the statistics, or are forgotten if channels share one.

    >>> sim.compute_encodings(batches, only_missing=True, progress=False)
    >>> _ = qtk.fold_batch_norms(sim)

    Args:
        sim: a calibrated ``QuantSim``; the running statistics of its model change.
        data: as for ``compute_encodings``.
        forward: how to run the model on a batch, e.g. ``lambda model, batch: model(batch[0])``.
        num_batches: stop after so many.
        progress: show a bar.
        valid: which tokens count, as for ``compute_encodings``: the statistics leave the others out; ``None``: all.

    Raises: CalibrationError for data that the model does not run on, or that make a statistic NaN or infinite, or if
        ``valid`` gives no mask;
        NotCalibratedError if an encoding is missing. Nothing has changed then.
    """
    simulation = sim.simulation
    norms = list(_norms(simulation.model))
    nothing = "the model has no batch norm; plan it with fold_batch_norms: at_export in the config to keep them"
    if not norms:
        return TransformResult("reestimate_batch_norms", (), nothing=nothing)
    missing = [site.name for site, quantizer in simulation.quantizers.items() if not quantizer.ready]
    if missing:
        raise NotCalibratedError(f"{missing[0]} has no encoding; run sim.compute_encodings(data) first")
    tokens = ValidTokens(simulation.model, valid)
    with tokens.listening(), _averaging(norms, tokens) as averages:
        run_all(simulation.model, data, forward=tokens.forward(forward), num_batches=num_batches, label="batch norms",
                progress=progress)
    tokens.warn_of_unfollowed({norm.read: norm.name for norm in norms})
    for norm in norms:
        if not all(bool(average.isfinite().all()) for average in averages[id(norm.mean)]):
            raise CalibrationError(f"{norm.name}: the statistics of its input became NaN or infinite; check the "
                                   "data, and the encodings in front of it")
    groups = tuple(_replace_statistics(simulation, norms, averages))
    return TransformResult("reestimate_batch_norms", groups, nothing=nothing)


def _replace_statistics(
    simulation: Simulation, norms: list[_Norm], averages: Mapping[int, tuple[Tensor, Tensor]]
) -> Iterator[GroupResult]:
    """Writes the averages into the batch norms, and forgets the encodings that no longer fit."""
    before = {norm.name: (norm.mean.clone(), norm.var.clone()) for norm in norms}
    for norm in norms:
        mean, var = averages[id(norm.mean)]
        norm.mean.copy_(mean)
        norm.var.copy_(var)
    for quantizer, norm in {q: norm for norm in norms if (q := weight_quantizer(norm.node)) is not None}.items():
        _follow(quantizer, norm, before[norm.name][1])
    for site in _behind(simulation, norms):
        quantizer = simulation.quantizers[site]
        if not quantizer.frozen:
            quantizer.drop_encoding()
    for norm in norms:
        yield GroupResult(norm.name, Outcome.APPLIED, _moved(norm, *before[norm.name]))


def _norms(model: nn.Module) -> Iterator[_Norm]:
    for graph in graphs(model).values():
        for node in graph.graph.nodes:
            module = batch_norm_called(node) or kept_batch_norm_called(node)
            mean, var = (*node.args, *[None] * 5)[3:5]
            if not isinstance(module, (BatchNorm, BatchNormBase)) or getattr(module, "always_batch_statistics", False):
                continue  # none, a frozen one, or one that takes no running statistics
            if isinstance(mean, fx.Node) and isinstance(var, fx.Node):
                tensors = attribute(graph, str(mean.target)), attribute(graph, str(var.target))
                yield _Norm(label(node, OWNER) or str(node.target), graph, node, module, *tensors)


@contextmanager
def _averaging(norms: list[_Norm], tokens: ValidTokens) -> Iterator[dict[int, tuple[Tensor, Tensor]]]:
    """While the body runs, batch norms normalise by the batch and average its statistics, in eval mode too.

    The statistics are computed over the valid tokens.

    Yields: id of a running mean → the averages of the means and of the variances; the running ones stay.
    """
    calls = Counter[int]()
    averages = {id(norm.mean): (norm.mean.clone(), norm.var.clone()) for norm in norms}

    def averaging(norm: _Norm) -> Callable[..., Tensor]:
        def averaged(
            x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, _: object,
            module: nn.Module, axis: int = 1, rank: int | None = None,
        ) -> Tensor:
            eps = float(module.eps)  # type: ignore[arg-type]
            average = averages[id(mean)]

            def normalized_by(statistics: tuple[Tensor, Tensor]) -> Tensor:
                return by_channels(lambda each: F.batch_norm(each, *statistics, weight, bias, False, 0.0, eps), x, axis,
                                   rank)

            counted = tokens.counted_at(norm.read, x)
            if counted is not None and not bool(counted.any()):
                return normalized_by(average)  # a batch of padding says nothing
            calls[id(mean)] += 1
            momentum = 1 / calls[id(mean)]
            if counted is None or bool(counted.all()):
                return by_channels(lambda each: F.batch_norm(each, *average, weight, bias, True, momentum, eps), x,
                                   axis, rank)
            rows = x.movedim(axis, -1)[counted.movedim(axis, -1).all(-1)]  # [rows, C]
            if len(rows) < 2:
                raise CalibrationError(f"{norm.name}: a batch has one valid token, which has no "
                                       "variance; pass larger batches, or leave this one out")
            F.batch_norm(rows, *average, None, None, True, momentum, eps)
            return normalized_by((rows.mean(0), rows.var(0, correction=0)))

        return averaged

    nodes: dict[fx.Node, Callable[..., Tensor | None]] = {norm.node: averaging(norm) for norm in norms}
    for norm in norms:  # a layer in front of one is not to compute what it will when folded
        nodes |= unfolded_targets(norm.node)
    before = {node: node.target for node in nodes}
    try:
        _set_targets(norms, nodes)
        yield averages
    finally:
        _set_targets(norms, before)


def _set_targets(norms: list[_Norm], targets: Mapping[fx.Node, fx.node.Target]) -> None:
    for node, target in targets.items():
        node.target = target
    for graph in {id(norm.graph): norm.graph for norm in norms}.values():
        graph.recompile()


def _follow(quantizer: Quantizer, norm: _Norm, var: Tensor) -> None:
    """Moves the scales of a weight that is quantized as folded as its batch norm's variance moved from ``var``."""
    if quantizer.frozen or quantizer.scale is None:
        return
    eps = float(norm.module.eps)
    factor = ((var.double() + eps) / (norm.var.double() + eps)).sqrt()
    if isinstance(quantizer.spec.granularity, PerChannel) and quantizer.scale.shape == factor.shape:
        quantizer.scale.mul_(factor)
    else:
        quantizer.drop_encoding()


def _behind(simulation: Simulation, norms: list[_Norm]) -> list[Site]:
    """The quantized values that depend on the output of a batch norm; all of other graphs, which may run later."""
    reached: set[fx.Node] = {norm.node for norm in norms}
    touched = {norm.graph for norm in norms}
    static = {site.name for site, decided in simulation.plan.items() if decided.static}
    names = set()
    for graph in graphs(simulation.model).values():
        for node in graph.graph.nodes:
            if not reached.isdisjoint(node.all_input_nodes):
                reached.add(node)
        for node, quantizer in quantizer_nodes(graph).items():
            if node in reached or (graph not in touched and quantizer.site not in static):
                names.add(quantizer.site)
    return [site for site, decided in simulation.plan.items() if decided.leader is None and site.name in names]


def _moved(norm: _Norm, mean: Tensor, var: Tensor) -> str:
    shift = float(((norm.mean - mean).abs() / (var + norm.module.eps).sqrt()).mean())
    ratio = float(((norm.var + norm.module.eps) / (var + norm.module.eps)).log().mean().exp())
    return f"mean moved by {shift:.2g} standard deviations, variance times {ratio:.2g} on average"
