"""One run of layer-wise methods over the layers of a simulation, with checkpoints and a progress bar."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from tqdm import tqdm

from qtk.calls.calls import Call
from qtk.layerwise.checkpoint import Checkpoint
from qtk.layerwise.interrupts import uninterrupted
from qtk.layerwise.layer_input import LayerInput
from qtk.layerwise.layer_state import columns_per_scale, scale_index_of
from qtk.layerwise.layer_update import LayerUpdate, compute_update
from qtk.layerwise.method_work import relative_cost
from qtk.layerwise.methods import LayerwiseMethod
from qtk.layerwise.options import LayerwiseOptions
from qtk.layerwise.originals import EarlierResults
from qtk.layerwise.ranks import holdout_of_ranks, layers_at_once, owners_of, spread, sum_over_ranks
from qtk.layerwise.report import LayerResult
from qtk.layerwise.sibling_experts import sibling_experts
from qtk.layerwise.sparsity import dense_layers
from qtk.layerwise.starved_matrices import StarvedMatrices
from qtk.layerwise.walk import walk
from qtk.layerwise.weighted_layers import WeightedLayer
from qtk.moments.holdout import Holdout
from qtk.moments.required_statistics import RequiredStatistics
from qtk.moments.second_moments import SecondMoments
from qtk.nn.device import device_of
from qtk.nn.mapped_weights import has_mapped, is_large, is_mapped, return_free_memory
from qtk.numerics.im2col import weight_to_gemm
from qtk.observers.ranks import agree, from_first, several_ranks


class LayerwiseRun:
    """Walks through the model once and updates layer after layer; every rank takes part.

    Args:
        model: a model with quantizers. Changed: its layers.
        methods: applied to each layer in order.
        layers: the layers to improve, each with an encoding.
        calls: the calls of the model, one for each batch.
        options: how it goes through the layers.
        earlier: the results of earlier runs.

    Raises: CalibrationError if the directory belongs to another run, or no such samples can be held out.
    """

    def __init__(
        self, model: nn.Module, methods: Sequence[LayerwiseMethod], layers: Sequence[WeightedLayer],
        calls: Sequence[Call], options: LayerwiseOptions, earlier: EarlierResults,
    ) -> None:
        holdout = holdout_of_ranks(options.holdout, options.groups, len(calls))
        self.dense = dense_layers(layers, options.sparsity)
        self._sparsity = options.sparsity
        self._methods = methods
        self._layers = layers
        self._device, self._is_large = device_of(model), is_large(model) or has_mapped(model)
        self._earlier = earlier
        self._short_of_data: list[str] = []
        self._without_holdout: list[str] = []
        self._waiting: list[LayerInput] = []
        self._checkpoint: Checkpoint | None = None
        self._finished: frozenset[str] = frozenset()
        directory = options.checkpoint_dir
        if directory is not None:
            names, settings = [layer.name for layer in layers], {
                "methods": repr(list(methods)), "inputs": options.inputs, "holdout": repr(holdout),
                "calibrate_all_experts": str(options.calibrate_all_experts), "sparsity": str(options.sparsity),
            }
            if (results := earlier.digest(layers)) is not None:
                settings["results of an earlier run"] = results
            data = [(call.args, call.kwargs, None if call.valid is None else call.valid.masks) for call in calls]
            self._checkpoint = from_first(lambda: Checkpoint(directory, names, settings, model, data))
            self._finished = from_first(lambda: self._checkpoint.finished if self._checkpoint else frozenset())
        siblings = sibling_experts(model, layers)
        self._starved = StarvedMatrices(siblings)
        required: dict[WeightedLayer, RequiredStatistics | None] = {
            layer: None if layer.name in self._finished else self._required(layer, holdout)
            for layer in layers
        } | {  # finished too: the others may need the rows of all
            layer: replace(self._required(layer, holdout), is_added_up=True)
            for group in siblings for layer in group
        }
        required |= dict.fromkeys(earlier.replayed)
        if holdout is not None and holdout.batches is not None and all(
            each is None or each.holdout is None for each in required.values()
        ) and not self._finished:
            warnings.warn(f"groups: the results of {', '.join(type(each).__name__ for each in methods)} are not judged "
                          "by their squared error alone, so that nothing is held out; leave groups out", stacklevel=4)
        self._required_of, self._siblings = required, {layer for group in siblings for layer in group}
        self._walk = walk(model, calls, required, inputs=options.inputs, offload=options.offload, holdout=holdout,
                          all_experts=options.calibrate_all_experts)

    @property
    def pooled(self) -> dict[str, str]:
        """See ``LayerwiseReport``."""
        return self._starved.found

    def _required(self, layer: WeightedLayer, holdout: Holdout | None) -> RequiredStatistics:
        is_pruned = self._sparsity is not None and layer.name not in self.dense
        return _required_statistics(layer, self._methods, holdout, is_pruned=is_pruned)

    def finish(self, *, progress: bool) -> list[LayerResult]:
        """Updates every layer. Returns: their results, in order. Raises: CalibrationError if a method fails."""
        updates: dict[str, tuple[LayerInput, LayerUpdate]] = {}
        with tqdm(total=len(self._layers), desc="layers", unit="layer", disable=not progress) as bar:
            while self._go_on(updates, bar):
                pass
        if self._short_of_data:
            warnings.warn(
                f"{len(self._short_of_data)} layers saw fewer rows of data than the methods need "
                f"({self._short_of_data[0]}, …), so that they fit noise: use more data, gptq with a larger damping, or "
                "adaround", stacklevel=4,
            )
        self._starved.warn()
        if self._without_holdout:
            warnings.warn(
                f"held out no samples for {len(self._without_holdout)} layers ({self._without_holdout[0]}, …), so that "
                "their results are judged on the data they were fitted to: use larger batches, more of them or a "
                "larger holdout; holdout=0 to ask for none", stacklevel=4,
            )
        return [_result(layer.name, updates.get(layer.name)) for layer in self._layers]

    def _go_on(self, updates: dict[str, tuple[LayerInput, LayerUpdate]], bar: tqdm[Any]) -> bool:
        """Walks to the next layer, and updates the layers that are ready. Returns: whether there was any.

        No local variable of its caller holds statistics while the walk goes on.
        """
        layer_input = self._next()
        if layer_input is not None and layer_input.layer in self._earlier.replayed:
            with uninterrupted():
                self._earlier.originals.restore(layer_input.layer)
        elif layer_input is not None:
            self._waiting += self._starved.ready(layer_input)
        if layer_input is None or layer_input.waits or len(self._waiting) >= layers_at_once():
            waiting, self._waiting = self._waiting, []
            for ready, update in self._updates(waiting):
                if update is not None:
                    updates[ready.layer.name] = replace(ready, moments=None), update
                    ratio = update.after / update.before if update.before > 0 else 0.0
                    bar.set_postfix_str(ready.layer.name + (f", loss x {ratio:.2f}" if ratio > 0 else ""))
                bar.update()
        return layer_input is not None

    def _next(self) -> LayerInput | None:
        """The next layer; statistics of an expert, which the other experts may need, are of the data of all ranks."""
        problem: Exception | None = None
        layer_input: LayerInput | None = None
        try:
            layer_input = next(self._walk, None)
        except Exception as error:  # the other ranks are waiting
            problem = error
        agree(problem)
        if layer_input is None or layer_input.layer not in self._siblings:
            return layer_input
        return replace(layer_input, moments=sum_over_ranks(layer_input.moments, self._device))

    def _updates(self, waiting: Sequence[LayerInput]) -> Iterator[tuple[LayerInput, LayerUpdate | None]]:
        """Writes the updates of layers, of which each is computed on one rank.

        Yields: every layer with its update, without tensors; ``None``: no data reached it.
        """
        checkpoint, solves = self._checkpoint, dict[str, tuple[Callable[[], LayerUpdate], int | None]]()
        unfinished = [each for each in waiting if each.layer.name not in self._finished]
        for each, owner in zip(unfinished, owners_of([self._cost(each.layer) for each in unfinished]), strict=True):
            moments = self._statistics(each, owner)
            if moments is not None:
                solves[each.layer.name] = partial(
                    compute_update, each.layer, self._methods, moments, self._earlier.present(each.layer),
                    self._sparsity), owner
        waiting = [replace(each, moments=None) for each in waiting]  # the owners have the sums
        tasks, owners = [task for task, _ in solves.values()], [owner for _, owner in solves.values()]
        if self._is_large:
            return_free_memory()  # of the walk
        solved = dict(zip(solves, spread(tasks, owners), strict=True))
        for each in waiting:
            layer, update = each.layer, solved.pop(each.layer.name, None)
            if checkpoint is not None and layer.name in self._finished:
                update = from_first(partial(checkpoint.load, layer))
            elif checkpoint is not None and update is not None:
                from_first(partial(checkpoint.save, layer, update))
                if is_mapped(layer.weight) and not several_ranks():  # then the file of the layer is its memory
                    update = checkpoint.load(layer)
            self._write(layer, update)
            yield each, None if update is None else replace(update, weight=None, bias=None)

    def _cost(self, layer: WeightedLayer) -> float:
        """Returns what solving a layer costs over what others cost."""
        groups, outputs, columns = weight_to_gemm(layer.weight.detach(), layer.geometry).shape
        required = self._required_of[layer]
        block = None if required is None else required.block
        return relative_cost(self._methods, groups, outputs, columns, block or columns)

    def _write(self, layer: WeightedLayer, update: LayerUpdate | None) -> None:
        """Writes the update of a layer; ``None``: what an earlier run has left, if the layer goes on from that."""
        originals = self._earlier.originals
        if update is not None:
            with uninterrupted():
                originals.keep(*update.written(layer))
                update.write(layer)
                originals.wrote(*update.written(layer))
            if self._is_large:
                return_free_memory()
        elif self._earlier.is_continued:
            originals.restore(layer)

    def _statistics(self, layer_input: LayerInput, owner: int | None) -> SecondMoments | None:
        """The statistics that a layer is updated by, Gram matrices on ``owner``; ``None`` if no data reached it."""
        layer, moments = layer_input.layer, layer_input.moments
        if layer not in self._siblings:
            moments = sum_over_ranks(moments, self._device, owner=owner)
        if moments is None or not moments.rows:
            return None
        is_short = moments.rows_of_all < max(method.min_rows(moments.columns) for method in self._methods)
        if is_short and layer.name not in self._starved.found:
            self._short_of_data.append(layer.name)
        if moments.held_out is not None and not moments.held_out.rows:
            self._without_holdout.append(layer.name)
        return self._starved.pooled(layer.name, moments)


def _required_statistics(
    layer: WeightedLayer, methods: Sequence[LayerwiseMethod], holdout: Holdout | None, *, is_pruned: bool
) -> RequiredStatistics:
    """Statistics that are enough for all methods, and to choose a mask by."""
    encoding = layer.quantizer.encoding
    assert encoding is not None
    scale_index = scale_index_of(layer.weight.shape, encoding, layer.geometry)
    block = columns_per_scale(scale_index)
    is_whole = block == scale_index.shape[-1]
    required = RequiredStatistics.union([
        *(method.required_statistics(None if is_whole else block) for method in methods),
        *([RequiredStatistics()] if is_pruned else []),
    ])
    is_squared_error = required.gram and not required.sample_rows and not required.difference
    return replace(required, holdout=holdout if is_squared_error else None)  # other losses cannot be judged by it


def _result(name: str, update: tuple[LayerInput, LayerUpdate] | None) -> LayerResult:
    if update is None:
        return LayerResult(name, reason="no data reached it")
    layer_input, found = update
    powers, held_out_powers = layer_input.output.measured(), layer_input.held_out_output.measured()
    if powers[0] is None and found.signals[0] > 0:  # one path: the error has no constant
        powers = found.signals[0], found.after
        if found.held_out is not None and found.signals[1] > 0:
            held_out_powers = found.signals[1], found.held_out[1]
    return LayerResult(
        name, found.before, found.after, *powers, winner=found.winner, held_out=found.held_out,
        held_out_powers=held_out_powers, zeros=found.zeros,
    )
