"""Cross-layer equalization on a captured graph: which channels have layers before and behind them, and their factors.

``ChannelScales`` finds the channels that may be scaled, and the parameters that absorb the factors, which
``qtk.algorithms.equalization`` computes. A ReLU6 between two layers becomes a clamp whose bounds are scaled too, so
that the function stays exactly what it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from qtk.algorithms.equalization import LayerMagnitudes, equalize
from qtk.calls.calls import Call
from qtk.capture.prepared_model import PreparedModel
from qtk.channels.channel_scales import ChannelScales, WeightedOutput
from qtk.operators.lookup import row_of
from qtk.transforms.absorb_bias import Statistics, absorbable_biases, folded_statistics
from qtk.transforms.clamp_step import clamp_steps
from qtk.transforms.fold_batch_norm_step import owner_of
from qtk.transforms.named_tensors import NamedTensors
from qtk.transforms.proof import Group, rewrite
from qtk.transforms.result import TransformResult
from qtk.transforms.steps import ScaleParameter, Step
from qtk.transforms.touched_sites import sites_of_parameters, sites_of_values

TRANSFORM = "equalize"
NOTHING = "the model has no two layers between which channels may be scaled"
EQUAL = 1.01
"""Ratio of two ranges that count as equal."""


def equalize_layers(model: PreparedModel, call: Call, statistics: Statistics | None = None) -> TransformResult:
    """Gives the weights before and behind every channel the same range, each group of channels proved.

    Biases far above 0 in front of a rectifier are absorbed by the layers behind it first, as far as the statistics of
    folded batch norms and the example inputs allow; the function stays what it was where values stay in that range.
    Mean, standard deviation and bias of a channel are scaled by one factor, so that their order makes no difference.

    Changes ``model``, a prepared one without quantizers; parameters are replaced, not written to.

    Args:
        model: the model.
        call: the example inputs.
        statistics: weight → mean and standard deviation of what its layer makes; ``None``: of folded batch norms.
    """
    scales = ChannelScales(model, call.args, call.kwargs)
    known = folded_statistics(model) if statistics is None else statistics
    absorbing = [group for group in absorbable_biases(model, scales, known) if group.steps]
    return rewrite(model, call, [*absorbing, *_groups(model, scales)], transform=TRANSFORM, nothing=NOTHING)


@dataclass(frozen=True, slots=True, eq=False)
class _Connection:
    """A weight, with the classes that its elements connect: broadcastable to it, −1 for elements without a factor."""

    weight: str
    outputs: Tensor
    inputs: Tensor


@dataclass(frozen=True, slots=True)
class _Between:
    """What produces and what reads a class of channels, by name of the parameter, and what forbids to scale it."""

    writers: tuple[str, ...]
    readers: tuple[str, ...]
    others: tuple[str, ...]

    def __str__(self) -> str:
        writers, readers = (", ".join(map(owner_of, names)) for names in (self.writers, self.readers))
        return f"{writers} → {readers}"


def _groups(model: PreparedModel, scales: ChannelScales) -> Iterator[Group]:
    connections = list(_connections(scales))
    classes = _classes(scales, connections)
    equalized = {between: members for between, members in classes.items() if not between.others}
    number = torch.full((scales.num_variables + 1,), -1)  # of a class to equalize; the last: of class −1
    channels: list[Tensor] = []
    total = 0
    for members in equalized.values():
        channels.append(torch.arange(total, total + len(members)))
        number[members] = channels[-1]
        total += len(members)
    tensors = NamedTensors(model).tensors()
    layers = [_magnitudes(tensors[connection.weight], connection, number) for connection in connections]
    result = equalize(layers, channels)
    for between, members in classes.items():
        if between.others:
            yield Group(str(between), (), f"{', '.join(between.others)} makes these channels too")
            continue
        own = number[members]
        before, after, factors = (_worst(result.before[own]), _worst(result.after[own]), result.factors[own])
        if before <= EQUAL:
            yield Group(str(between), (), "the ranges are equal already")
            continue
        by_variable = torch.ones(scales.num_variables, dtype=torch.float64)
        by_variable[members] = factors
        changed = scales.parameter_factors(by_variable)
        steps: list[Step] = [ScaleParameter(name, factor) for name, factor in changed.items()]
        steps += clamp_steps(scales, by_variable, NamedTensors(model))
        detail = f"{len(members)} channels, largest ratio of two ranges {before:.3g} → {after:.3g}"
        sites = sites_of_values(scales.scaled_values(by_variable)) | sites_of_parameters(model, changed)
        yield Group(str(between), tuple(steps), detail, tuple(sorted(sites, key=str)))


def _connections(scales: ChannelScales) -> Iterator[_Connection]:
    """Every weight that is multiplied with an input; once for each way in which it is used."""
    written = {(id(output.graph), output.node): output for output in scales.outputs}
    seen: dict[str, list[_Connection]] = {}
    for read in scales.inputs:
        output = written.get((id(read.graph), read.node))
        if read.weight is None or read.weight_index is None or output is None:
            continue
        connection = _Connection(
            read.weight, _at(output.variables, output.weight_index), _at(read.variables, read.weight_index)
        )
        known = seen.setdefault(read.weight, [])
        if not any(_same(connection, other) for other in known):
            known.append(connection)
            yield connection


def _same(a: _Connection, b: _Connection) -> bool:
    return all(
        x.shape == y.shape and torch.equal(x, y) for x, y in ((a.outputs, b.outputs), (a.inputs, b.inputs))
    )


def _at(variables: Tensor, index: Tensor) -> Tensor:
    """The class of the channel of each element; −1 stays −1."""
    return torch.cat([variables, variables.new_tensor([-1])])[index]


def _classes(scales: ChannelScales, connections: list[_Connection]) -> dict[_Between, Tensor]:
    """The free classes that layers produce and read, by what does so, in graph order."""
    writers: dict[int, dict[str, None]] = {}
    readers: dict[int, dict[str, None]] = {}
    others: dict[int, dict[str, None]] = {}
    for connection in connections:
        for index, found in ((connection.outputs, writers), (connection.inputs, readers)):
            for variable in index.unique().tolist():  # type: ignore[no-untyped-call]
                found.setdefault(variable, {})[connection.weight] = None
    for output in scales.outputs:
        if not _is_layer(output):
            for variable in output.variables.unique().tolist():  # type: ignore[no-untyped-call]
                others.setdefault(variable, {})[output.weight] = None
    classes: dict[_Between, list[int]] = {}
    for variable in sorted(readers.keys() & (writers.keys() | others.keys()) - {-1}):
        names = (tuple(found.get(variable, ())) for found in (writers, readers, others))
        classes.setdefault(_Between(*names), []).append(variable)
    return {between: torch.tensor(members) for between, members in classes.items()}


def _is_layer(output: WeightedOutput) -> bool:
    row = row_of(output.node)
    return row is not None and row.product is not None


def _magnitudes(weight: Tensor, connection: _Connection, number: Tensor) -> LayerMagnitudes:
    """The magnitudes of a weight, with the largest alone along axes where all elements connect the same channels."""
    outputs, inputs = number[connection.outputs], number[connection.inputs]
    magnitudes = weight.detach().abs().cpu()
    magnitudes = magnitudes if magnitudes.dtype == torch.float64 else magnitudes.float()
    kernel = [axis for axis in range(weight.ndim) if outputs.shape[axis] == inputs.shape[axis] == 1]
    if kernel:
        magnitudes = magnitudes.amax(kernel, keepdim=True)
    return LayerMagnitudes(magnitudes, outputs, inputs)


def _worst(ratios: Tensor) -> float:
    return float(torch.maximum(ratios, 1 / ratios).max())
