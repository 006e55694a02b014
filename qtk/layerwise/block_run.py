"""One run of block reconstruction: window after window of blocks is learned, and kept if its held-out error falls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn
from tqdm import tqdm

from qtk.algorithms.distillation import distillation_loss
from qtk.algorithms.soft_rounding import SoftRounding
from qtk.algorithms.weight_grid import WeightGrid
from qtk.calls.calls import Call
from qtk.core.encoding import Encoding
from qtk.errors import CalibrationError
from qtk.graph.written_buffers import is_input
from qtk.layerwise.blocks import block_starts, windows
from qtk.layerwise.candidates import NONE
from qtk.layerwise.checkpoint import Checkpoint
from qtk.layerwise.interrupts import uninterrupted
from qtk.layerwise.layer_update import LayerUpdate
from qtk.layerwise.live_values import LiveValues, Values
from qtk.layerwise.options import LayerwiseOptions
from qtk.layerwise.originals import EarlierResults
from qtk.layerwise.path_evaluator import PathEvaluator, quantizers_in
from qtk.layerwise.reconstruction import Reconstruction
from qtk.layerwise.report import LayerResult
from qtk.layerwise.sparsity import zeros_of
from qtk.layerwise.walk import only_graph, start_values
from qtk.layerwise.weighted_layers import WeightedLayer
from qtk.moments.batch_rows import BatchRows
from qtk.moments.holdout import holdout_of
from qtk.numerics.affine import expand
from qtk.numerics.im2col import Geometry
from qtk.observers.ranks import several_ranks
from qtk.operators.targets import called_module
from qtk.ops.gradient_scale import GradientScale
from qtk.quantizers.quantizer import Mode, Quantizer

FLOAT, QUANTIZED = 0, 1
"""The paths."""
SEED = 0
OUTPUTS_KEPT = 1 << 24
"""Numbers of the model's float outputs up to which those of all batches are kept, to compare with."""
TINY = 1e-30
NUMBERS = ("noise", "signal", "divergence")

Hook: TypeAlias = Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class _Window:
    """Blocks that are learned together: the nodes from ``begin`` to before ``end``.

    Args:
        name: of its weights.
        ends: the ends of its blocks.
        layers: whose rounding is learned.
        ranges: the quantizers whose ranges are learned.
    """

    name: str
    begin: int
    ends: tuple[int, ...]
    layers: tuple[WeightedLayer, ...]
    ranges: tuple[Quantizer, ...]

    @property
    def end(self) -> int:
        return self.ends[-1]


@dataclass(slots=True)
class _Errors:
    """Sums over samples: squared error of what leaves blocks and its power, and the divergence of the model's output.

    Every value that leaves a block counts as much, whatever its power.
    """

    noise: Tensor = field(default_factory=lambda: torch.zeros(()))
    signal: float = 0.0
    divergence: Tensor = field(default_factory=lambda: torch.zeros(()))

    def add(self, other: _Errors) -> None:
        self.noise, self.divergence = self.noise + other.noise, self.divergence + other.divergence
        self.signal += other.signal


Parts: TypeAlias = tuple[_Errors, _Errors]
"""Over the samples that are seen, and over those that are held out."""


class BlockRun:
    """Goes through the model once and reconstructs window after window.

    Of every batch the values that enter a window are kept, in float and quantized, and the float ones that leave it.

    Args:
        model: a model with quantizers. Changed: weights of its layers, and ranges of its activations, which end frozen.
        method: the settings.
        layers: those to improve, each with an encoding.
        calls: the calls of the model, one for each batch.
        options: how it goes through the model.
        earlier: the results of earlier runs.

    Raises: CalibrationError if the model is not one graph, an option does not apply, no such samples can be held out,
        or the checkpoint directory belongs to another run.
    """

    def __init__(
        self, model: nn.Module, method: Reconstruction, layers: Sequence[WeightedLayer], calls: Sequence[Call],
        options: LayerwiseOptions, earlier: EarlierResults,
    ) -> None:
        graph = only_graph(model, calls)
        if graph is None:
            raise CalibrationError("reconstruction needs a model of one graph, and calls of one kind; this one runs as "
                                   "Python around its graphs (prepared.report has the reason); use other methods")
        if several_ranks():
            raise CalibrationError("reconstruction runs in one process; call it without torchrun")
        if options.inputs == "symqt" or options.calibrate_all_experts or options.sparsity is not None:
            raise CalibrationError("reconstruction alone takes inputs='asym' or 'symfp', and neither "
                                   "calibrate_all_experts nor sparsity: a method before it chooses the mask")
        self.pooled: Mapping[str, str] = {}
        self.dense: Mapping[str, str] = {}
        self._graph, self._method, self._calls, self._earlier = graph, method, calls, earlier
        self._entering = FLOAT if options.inputs == "symfp" else QUANTIZED
        holdout = holdout_of(options.holdout, options.groups, len(calls))
        self._is_split = holdout is not None
        self._rows = BatchRows(graph, calls, holdout)
        moved = {move for layer in (*layers, *earlier.replayed) for move in layer.moves}
        self._paths = PathEvaluator(graph, (False, True), moved)
        self._nodes: list[fx.Node] = list(graph.graph.nodes)
        self._last_reads = {read: index for index, node in enumerate(self._nodes)
                            for read in (node, *self._paths.reads(node))}
        self._readers = self._readers_of_quantizers()
        self._windows = self._find_windows(layers)
        self._live, self._targets = LiveValues(options.offload), LiveValues(options.offload)
        self._powers: dict[fx.Node, float] = {}
        self._outputs: dict[int, list[Tensor]] = {}
        self._ranges: list[tuple[Quantizer, Encoding]] = []
        self._checkpoint = None if options.checkpoint_dir is None else Checkpoint(
            options.checkpoint_dir, [window.name for window in self._windows], {
                "methods": repr([method]), "inputs": options.inputs, "holdout": repr(holdout),
                "results of an earlier run": str(earlier.digest(layers)),
            }, model, [(call.args, call.kwargs, None if call.valid is None else call.valid.masks) for call in calls])

    def finish(self, *, progress: bool) -> list[LayerResult]:
        """Reconstructs every window. Returns: their results, in order."""
        results = []
        try:
            for batch, call in enumerate(self._calls):
                self._live.put(batch, start_values(self._graph, call, 2))
            with tqdm(self._windows, desc="blocks", unit="block", disable=not progress) as bar:
                for window in bar:
                    results.append(self._reconstruct(window))
                    bar.set_postfix_str(str(results[-1]))
        except BaseException:
            with uninterrupted():
                for quantizer, encoding in self._ranges:
                    _set_range(quantizer, encoding, frozen=False)
            raise
        finally:
            self._live.close()
            self._targets.close()
        return results

    def _readers_of_quantizers(self) -> dict[Quantizer, list[int]]:
        """The nodes that call a quantizer, or read a parameter that it quantizes, by index."""
        readers: dict[Quantizer, list[int]] = {}
        for index, node in enumerate(self._nodes):
            if self._paths.is_parameter(node):
                continue
            module, parameters = called_module(node), map(self._paths.parameter, node.all_input_nodes)
            own = [] if module is None else quantizers_in(module)
            for quantizer in (*own, *(self._paths.quantizers[each] for each in parameters
                                      if each in self._paths.quantizers and self._paths.is_parameter(each))):
                readers.setdefault(quantizer, []).append(index)
        return readers

    def _find_windows(self, layers: Sequence[WeightedLayer]) -> list[_Window]:
        layer_of = {layer.quantizer: layer for layer in layers}
        weighted = {self._nodes[index] for quantizer in layer_of for index in self._readers.get(quantizer, ())}
        starts = block_starts(self._nodes, weighted, self._last_reads, self._paths.is_parameter)
        found = []
        for begin, *ends in windows(starts, self._method.window, len(self._nodes) - 1):
            end = ends[-1]
            inside = [each for each, at in self._readers.items() if all(begin <= index < end for index in at)]
            own = tuple(layer_of[each] for each in inside if each in layer_of)
            ranges = tuple(each for each in inside if each.scale is not None and each.mode is Mode.SIMULATE and not (
                each.static or each.frozen or each.learns_range or each.spec.scale_format is not None))
            names = [layer.name for layer in own]
            name = f"{names[0]} … {names[-1]}" if names[1:] else names[0] if names else f"from {self._nodes[begin]}"
            found.append(_Window(name, begin, tuple(ends), own, ranges))
        return found

    def _reconstruct(self, window: _Window) -> LayerResult:
        """Learns a window, and goes on to its end with what is kept."""
        self._powers = {}
        for batch in range(len(self._calls)):
            values = self._live.take(batch)
            with torch.no_grad():
                targets = self._advanced(window.begin, window.ends, values, FLOAT)
            for node, target in self._made(values, targets):
                power = target.float().square().sum()
                self._powers[node] = self._powers.get(node, 0.0) + float(power)
            self._targets.put(batch, targets)
            self._live.put(batch, values)
        float_weights = [layer.weight.detach().clone() for layer in window.layers]
        self._restore(window)
        result = self._learned(window, float_weights)
        for batch in range(len(self._calls)):
            with torch.no_grad():
                passed = self._advanced(window.begin, (window.end,), self._live.take(batch), QUANTIZED)
            targets = self._targets.take(batch)
            self._live.put(batch, {node: (targets[node][FLOAT], passed[node][QUANTIZED]) for node in passed})
        return result

    def _restore(self, window: _Window) -> None:
        """Gives layers their results of earlier runs, where the quantized path reads them first."""
        originals = self._earlier.originals
        continued = window.layers if self._earlier.is_continued else ()
        for layer in (*continued, *self._earlier.replayed):
            first = min(self._readers.get(layer.quantizer, [-1]))
            if originals.present(layer) is not None and window.begin <= first < window.end:
                self._paths.keep_float((layer.parameter, layer.bias))
                with uninterrupted():
                    originals.restore(layer)

    def _learned(self, window: _Window, float_weights: Sequence[Tensor]) -> LayerResult:
        """The result for a window, which changes if its held-out error falls."""
        if self._checkpoint is not None and window.name in self._checkpoint.finished:
            return self._resumed(window, self._checkpoint)
        before = after = self._measured(window)
        weights: list[Tensor] = []
        winner, former = NONE, list(zip(window.ranges, _encodings(window.ranges), strict=True))
        self._ranges += former
        if window.layers or window.ranges:
            roundings = {layer.quantizer: _soft_rounding(layer, float_weight)
                         for layer, float_weight in zip(window.layers, float_weights, strict=True)}
            self._descend(window, roundings, before[0])
            judge = int(bool(before[1].signal))
            with _hooked({each: _replacing(rounding.rounded) for each, rounding in roundings.items()}):
                learned = self._measured(window)
            ratio = float(self._loss(learned[judge], before[judge]) / self._loss(before[judge], before[judge]))
            if ratio < 1:
                after, winner = learned, f"Reconstruction, loss × {ratio:.2f}"
                weights = [roundings[layer.quantizer].rounded().to(layer.weight.dtype) for layer in window.layers]
        if winner == NONE:
            with uninterrupted():
                for quantizer, encoding in former:
                    _set_range(quantizer, encoding, frozen=False)
        else:
            self._write(window, weights, _encodings(window.ranges))
        if self._checkpoint is not None:
            self._save(self._checkpoint, window, winner, before, after)
        return _result(window.name, winner, before, after)

    def _write(self, window: _Window, weights: Sequence[Tensor], ranges: Sequence[Encoding]) -> None:
        originals = self._earlier.originals
        with uninterrupted():
            for layer, weight in zip(window.layers, weights, strict=True):
                encoding = layer.quantizer.encoding
                assert encoding is not None
                originals.keep(layer.weight)
                LayerUpdate(encoding, weight, None, 0.0, 0.0).write(layer)
                originals.wrote(layer.weight)
            for quantizer, encoding in zip(window.ranges, ranges, strict=True):
                _set_range(quantizer, encoding, frozen=True)

    def _save(self, checkpoint: Checkpoint, window: _Window, winner: str, before: Parts, after: Parts) -> None:
        tensors: dict[str, Tensor | None] = {}
        if winner != NONE:
            tensors = {f"weight {index}": layer.weight for index, layer in enumerate(window.layers)}
            for index, encoding in enumerate(_encodings(window.ranges)):
                tensors |= {f"scale {index}": encoding.scale, f"zero_point {index}": encoding.zero_point}
        numbers = [float(getattr(each, name)) for each in (*before, *after) for name in NUMBERS]
        checkpoint.write(window.name, tensors, {"winner": winner, "errors": " ".join(map(float.hex, numbers))})

    def _resumed(self, window: _Window, checkpoint: Checkpoint) -> LayerResult:
        device = next(self._graph.parameters()).device
        tensors, numbers = checkpoint.read(window.name, device, ("winner", "errors"))
        errors = iter(map(float.fromhex, numbers["errors"].split()))
        parts = [_Errors(torch.tensor(noise), signal, torch.tensor(divergence))
                 for noise, signal, divergence in zip(errors, errors, errors, strict=True)]
        if numbers["winner"] != NONE:
            self._ranges += zip(window.ranges, _encodings(window.ranges), strict=True)
            self._write(window, [tensors[f"weight {index}"] for index in range(len(window.layers))], [
                Encoding(each.spec, tensors[f"scale {index}"], tensors.get(f"zero_point {index}"))
                for index, each in enumerate(window.ranges)])
        return _result(window.name, numbers["winner"], (parts[0], parts[1]), (parts[2], parts[3]))

    def _descend(self, window: _Window, roundings: Mapping[Quantizer, SoftRounding], before: _Errors) -> None:
        """Learns roundings and ranges; ranges end fixed."""
        method = self._method
        for quantizer in window.ranges:
            quantizer.learn_range(GradientScale.NONE)
        ranges = [parameter for each in window.ranges for parameter in each.parameters(recurse=False)]
        variables = [each.variable for each in roundings.values()]
        groups = (variables, method.learning_rate), (ranges, method.range_learning_rate)
        optimizer = torch.optim.Adam([{"params": each, "lr": rate} for each, rate in groups if each])
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, method.iterations)
        hooks = {each: _replacing(rounding.weight) for each, rounding in roundings.items()}
        if method.drop:
            hooks |= dict.fromkeys(window.ranges, lambda module, args, output: _mixed(args[0], output, method.drop))
        device, order = next(self._graph.parameters()).device, list[int]()
        try:
            with torch.enable_grad(), _hooked(hooks), torch.random.fork_rng([device] if device.type == "cuda" else []):
                torch.manual_seed(SEED)
                for step in range(method.iterations):
                    order = order or torch.randperm(len(self._calls)).tolist()
                    errors, _ = self._errors(window, order.pop(), method.drop)
                    share = errors.signal / before.signal if before.signal else 0.0
                    if not share:
                        continue
                    loss = self._loss(errors, before, share)
                    progress = (step / method.iterations - method.warm_start) / (1 - method.warm_start)
                    if progress > 0 and roundings:
                        undecided = torch.stack([each.undecided(progress) for each in roundings.values()])
                        loss = loss + method.regularization * undecided.mean()
                    optimizer.zero_grad()
                    torch.autograd.backward(loss, inputs=[*variables, *ranges])
                    optimizer.step()
                    schedule.step()
        finally:
            for quantizer in window.ranges:
                quantizer.fix_range()

    def _measured(self, window: _Window) -> Parts:
        """The errors over all batches."""
        seen, held_out = _Errors(), _Errors()
        with torch.no_grad():
            for batch in range(len(self._calls)):
                for total, part in zip((seen, held_out), self._errors(window, batch), strict=True):
                    total.add(part)
        return seen, held_out

    def _loss(self, errors: _Errors, before: _Errors, share: float = 1.0) -> Tensor:
        """Error and divergence, each in units of what it was before, over a share of the data."""
        weight = self._method.divergence
        loss = errors.noise / max(share * float(before.noise), TINY)
        return loss + weight * errors.divergence / max(share * float(before.divergence), TINY) if weight else loss

    def _errors(self, window: _Window, batch: int, drop: float = 0.0) -> Parts:
        """The errors of a batch; values that enter are the float ones with probability ``drop``."""
        stored, targets = self._live.take(batch), self._targets.take(batch)
        self._live.put(batch, stored)
        self._targets.put(batch, targets)
        values = {node: (_mixed(both[FLOAT], both[self._entering], drop),) * 2 for node, both in stored.items()}
        passed = self._advanced(window.begin, window.ends, values, QUANTIZED)
        parts = _Errors(), _Errors()
        for node, value in self._made(stored, passed):
            target, weight = targets[node][FLOAT], 1 / max(len(self._powers) * self._powers[node], TINY)
            if value.shape == target.shape:
                pairs = zip(self._split(node, value, batch), self._split(node, target, batch), strict=True)
                for part, (own, wanted) in zip(parts, pairs, strict=False):
                    noise = (own.float() - wanted.float()).square().sum()
                    part.add(_Errors(noise * weight, float(wanted.float().square().sum()) * weight))
        if self._method.divergence:
            wanted_outputs = self._float_outputs(window, batch, targets)
            outputs = self._outputs_of(self._advanced(window.end, (len(self._nodes) - 1,), passed, FLOAT))
            for (node, output), wanted in zip(outputs, wanted_outputs, strict=True):
                if output.shape == wanted.shape:
                    pairs = zip(self._split(node, output, batch), self._split(node, wanted, batch), strict=True)
                    for part, (own, other) in zip(parts, pairs, strict=False):
                        part.divergence = part.divergence + _divergence(own, other)
        return parts

    def _float_outputs(self, window: _Window, batch: int, targets: Values) -> list[Tensor]:
        outputs = self._outputs.get(batch)
        if outputs is None:
            with torch.no_grad():
                passed = self._advanced(window.end, (len(self._nodes) - 1,), targets, FLOAT)
            outputs = [output for _, output in self._outputs_of(passed)]
            if sum(output.numel() for output in outputs) * len(self._calls) <= OUTPUTS_KEPT:
                self._outputs[batch] = outputs
        return outputs

    def _outputs_of(self, values: Values) -> list[tuple[fx.Node, Tensor]]:
        """The float tensors that the model returns."""
        given = [(node, values[node][FLOAT]) for node in self._nodes[-1].all_input_nodes if node in values]
        return [(node, value) for node, value in given if isinstance(value, Tensor) and value.is_floating_point()]

    def _split(self, node: fx.Node, value: Tensor, batch: int) -> tuple[Tensor, ...]:
        """The rows that count, of the samples that are seen and of those held out."""
        if self._is_split:
            return self._rows.split(node, value, batch, Geometry.linear())
        return (self._rows.rows(node, value, batch),)

    def _advanced(self, begin: int, ends: Sequence[int], values: Values, path: int) -> Values:
        """Runs the nodes from ``begin`` to before the last end on one path. Returns: what is to be read at any end."""
        values, kept = dict(values), dict[fx.Node, None]()
        for start, end in pairwise((begin, *ends)):
            for node in self._nodes[start:end]:
                if not (is_input(node) or self._paths.is_parameter(node)):
                    values[node] = (self._paths.evaluate(node, values, path),) * 2
            kept |= dict.fromkeys(node for node in values if self._last_reads[node] >= end)
        return {node: values[node] for node in kept}

    @staticmethod
    def _made(entered: Values, passed: Values) -> list[tuple[fx.Node, Tensor]]:
        """The float tensors among ``passed`` that did not enter."""
        return [(node, both[FLOAT]) for node, both in passed.items() if node not in entered
                and isinstance(both[FLOAT], Tensor) and both[FLOAT].is_floating_point()]


def _soft_rounding(layer: WeightedLayer, float_weight: Tensor) -> SoftRounding:
    encoding = layer.quantizer.encoding
    assert encoding is not None
    shape, block_size = layer.weight.shape, encoding.spec.granularity.block_size(layer.weight.ndim)
    scale, zero_point = (None if each is None else expand(each, shape, block_size).expand(shape).contiguous()
                         for each in (encoding.scale, encoding.zero_point))
    assert scale is not None
    grid = WeightGrid(encoding.spec, scale, zero_point)
    zeros, _ = zeros_of(layer.geometry, float_weight, layer.weight.detach())
    weight, present = float_weight.to(torch.float32), layer.weight.detach().to(torch.float32)
    return SoftRounding(weight, grid if zeros is None else grid.pruned(zeros), grid.nearest(present))


def _replacing(value: Callable[[], Tensor]) -> Hook:
    return lambda module, args, output: value().to(output.dtype)


@contextmanager
def _hooked(hooks: Mapping[Quantizer, Hook]) -> Iterator[None]:
    """Hooks of quantizers act while the body runs."""
    with ExitStack() as stack:
        for quantizer, hook in hooks.items():
            stack.callback(quantizer.register_forward_hook(hook).remove)
        yield


def _mixed(float_value: Any, value: Any, drop: float) -> Any:
    """A value that is the float one with probability ``drop``, number by number (QDrop, equation 9)."""
    if not drop or value is float_value or not (isinstance(value, Tensor) and isinstance(float_value, Tensor)):
        return value
    if value.shape != float_value.shape or not value.is_floating_point():
        return value
    return torch.where(torch.rand_like(value) < drop, float_value, value)


def _divergence(output: Tensor, wanted: Tensor) -> Tensor:
    """The Kullback-Leibler divergence of scores, summed; the squared error of outputs without an axis of classes."""
    if output.ndim < 2 or output.shape[-1] < 2 or not output.numel():
        return (output.float() - wanted.float()).square().sum()
    return distillation_loss(output, wanted) * (output.numel() // output.shape[-1])


def _encodings(quantizers: Sequence[Quantizer]) -> list[Encoding]:
    return [encoding for each in quantizers if (encoding := each.encoding) is not None]


def _set_range(quantizer: Quantizer, encoding: Encoding, *, frozen: bool) -> None:
    quantizer.fix_range()
    quantizer.frozen = False
    quantizer.load_encoding(encoding)
    quantizer.frozen = frozen


def _result(name: str, winner: str, before: Parts, after: Parts) -> LayerResult:
    held_out = (float(before[1].noise), float(after[1].noise)) if before[1].signal else None
    noise = [float(seen.noise + unseen.noise) for seen, unseen in (before, after)]
    return LayerResult(
        name, noise[0], noise[1], before[0].signal + before[1].signal, noise[1], winner=winner, held_out=held_out,
        held_out_powers=(None, None) if held_out is None else (before[1].signal, held_out[1]),
    )
