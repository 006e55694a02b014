"""The divergence of a model's outputs from the float model's over held-out samples, which chains are compared by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, fx, nn

from qtk.calls.calls import Call
from qtk.errors import CalibrationError
from qtk.layerwise.block_errors import divergences
from qtk.layerwise.live_values import start_values
from qtk.layerwise.path_evaluator import PathEvaluator
from qtk.layerwise.walk import only_graph
from qtk.moments.batch_rows import BatchRows
from qtk.moments.holdout import Holdout
from qtk.numerics.im2col import Geometry


class OutputJudge:
    """Measures the outputs of a simulation against the float model's, over the samples that no method sees.

    Args:
        model: a model with quantizers, with the float weights in place, in eval mode.
        calls: its calls, one for each batch.
        holdout: the samples that are held out.

    Raises: CalibrationError if the model is not one graph, or if it returns no float tensor with held-out samples.
    """

    def __init__(self, model: nn.Module, calls: Sequence[Call], holdout: Holdout) -> None:
        graph = only_graph(model, calls)
        if graph is None:
            raise CalibrationError("judge_parts needs a model of one graph, and calls of one kind; this one runs as "
                                   "Python around its graphs (prepared.report has the reason), or the data have calls "
                                   "of several kinds; leave it out")
        self._graph, self._calls, self._holdout = graph, calls, holdout
        self._rows = BatchRows(graph, calls, holdout)
        self._nodes: list[fx.Node] = list(graph.graph.nodes)
        self._paths = {is_quantized: PathEvaluator(graph, (is_quantized,)) for is_quantized in (False, True)}
        last_reads = {read: node for node in self._nodes for read in self._paths[True].reads(node)}
        self._freed_after: dict[fx.Node, list[fx.Node]] = {}
        for read, node in last_reads.items():
            self._freed_after.setdefault(node, []).append(read)
        self._wanted = [list(self._outputs(batch, is_quantized=False)) for batch in range(len(calls))]
        if not any(output.numel() for outputs in self._wanted for output in outputs):
            raise CalibrationError("judge_parts: the model returns no float tensor of samples that are held out; use "
                                   "larger batches, more of them, or leave judge_parts out")

    def divergence(self) -> float:
        """The divergence of the simulation as it is, the mean over the rows of an output, summed over the outputs.

        It is as for block reconstruction: of scores the Kullback-Leibler divergence, of outputs without an axis of
        classes the squared error, relative to their power.
        """
        found: list[list[Tensor]] = []
        for batch, wanted in enumerate(self._wanted):
            for index, pair in enumerate(zip(self._outputs(batch, is_quantized=True), wanted, strict=True)):
                if index == len(found):
                    found.append([])
                if pair[0].shape == pair[1].shape:  # else data decide which rows there are
                    found[index].append(divergences(*pair))
        rows = [torch.cat(each) for each in found if each]
        return sum(float(each.sum()) / max(len(each), 1) for each in rows)

    @torch.no_grad()
    def _outputs(self, batch: int, *, is_quantized: bool) -> Iterator[Tensor]:
        """The held-out part of every float tensor that the model returns, of the rows whose tokens count."""
        values = start_values(self._graph, self._calls[batch], 1)
        for node in self._nodes[:-1]:
            self._paths[is_quantized].run(node, values)
            for read in self._freed_after.get(node, ()):
                values.pop(read, None)
        for node in self._nodes[-1].all_input_nodes:
            value = values[node][0] if node in values else None
            if isinstance(value, Tensor) and value.is_floating_point():
                yield self._held_out(node, value, batch)

    def _held_out(self, node: fx.Node, value: Tensor, batch: int) -> Tensor:
        if value.ndim < 2:
            return self._holdout.split(value, batch)[1] if value.ndim else value[None][:0]
        return self._rows.split(node, value, batch, Geometry.linear())[1]
