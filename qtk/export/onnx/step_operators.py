"""Runs each layer of a recurrent net, in each direction, as the operator of an exported file that computes it.

1. A step whose two products read dynamically quantized values, and in which nothing else is quantized, as ONNX
   Runtime's DynamicQuantizeLSTM (``dynamic_lstms``), where the file may hold operators of that runtime's own.
2. A step of an LSTM or GRU in which nothing is quantized, without projected states and not of packed sequences, as
   LSTM or GRU with one layer.
3. Any other as Scan (``scan_over_time``). A cell's has one step, where the file may hold operators of that runtime's
   own: as the ops of its formula it takes the same time (85 and 86 µs for LSTMCell(64, 256), 74 and 75 for GRUCell,
   medians in turns, one thread, ONNX Runtime 1.32), and loses the integer product of the hidden state.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from qtk.core.dtypes import dtype
from qtk.core.granularity import PerChannel, PerTensor
from qtk.core.spec import QuantSpec
from qtk.export.onnx.scan_over_time import scan_over_time
from qtk.export.onnx.site_markers import SITE_MARKER
from qtk.export.simulated_sites import SimulatedSite
from qtk.graph.captured_graph import CapturedGraph
from qtk.graph.graphs import nested_graphs
from qtk.nn.recurrent import SEQUENCES, Kind, Recurrent, RecurrentCell, StepParameters, TimeStep

ONE_OPERATOR = ("lstm", "gru")
"""Kinds of recurrent nets that torch's exporter translates."""

DYNAMIC_INPUT = QuantSpec(dtype("uint8"), PerTensor(), symmetric=False, dynamic=True)
"""How the operator quantizes what its products read."""

PARTS = {"projection": 0, "cell": 1}
"""The graphs of a step → the position, among their inputs, of what their product multiplies its weight with."""

DYNAMIC_LSTM = "qtk::dynamic_lstm"

torch.library.define(DYNAMIC_LSTM, "(Tensor x, Tensor hidden, Tensor cell, Tensor w_ih, Tensor w_hh, Tensor? b_ih, "
                     "Tensor? b_hh, bool backwards) -> (Tensor, Tensor, Tensor)")


def _results(x: Tensor, hidden: Tensor, cell: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    """Tensors like the outputs of the op: x [T, N, I], states [N, H] → [T, N, H], and states."""
    return x.new_empty(*x.shape[:2], hidden.shape[-1]), torch.empty_like(hidden), torch.empty_like(cell)


torch.library.register_fake(DYNAMIC_LSTM, _results)


@dataclass(frozen=True, slots=True)
class DynamicStep:
    """The names of the sites in a step of case 1. Args: ``x`` and ``hidden``: of what the two products read."""

    x: str
    hidden: str


def step_operators(
    call: fx.Node, copied: Recurrent | RecurrentCell, sites: Mapping[fx.Node, SimulatedSite], *, contrib_operators: bool
) -> StepOperators:
    """Returns what runs the steps of a composite in a file.

    Args:
        call: the call of the composite, with quantizers in its graphs.
        copied: the copy of the composite that is exported.
        sites: the calls of quantizers that are exported.
        contrib_operators: whether the file may hold operators of ONNX Runtime's own.
    """
    names = copied.step_names if isinstance(copied, Recurrent) else ["step"]
    by_path, weights = nested_graphs(call), call.args[2]
    assert isinstance(weights, (list, tuple))
    per_step = len(weights) // len(names)
    dynamic, quantized = {}, set()
    for index, name in enumerate(names):
        step, parts = copied.get_submodule(name), {path: by_path.get(f"{name}.{path}") for path in PARTS}
        of_step = weights[index * per_step : (index + 1) * per_step]
        found = _dynamic_step(parts, of_step, sites) if contrib_operators else None
        if found is not None:
            dynamic[step] = found
        elif any(node in sites for part in parts.values() if part is not None for node in part.graph.nodes):
            quantized.add(step)
    return StepOperators(copied.kind, dynamic, quantized)


class StepOperators:
    """An ``OverTime`` that picks the operator of each step.

    Args:
        kind: of the net.
        dynamic: step of case 1 → its sites.
        quantized: the other steps in which a value is quantized.
    """

    def __init__(self, kind: Kind, dynamic: Mapping[nn.Module, DynamicStep], quantized: Collection[nn.Module]) -> None:
        self._kind, self._dynamic, self._quantized = kind, dynamic, quantized

    def __call__(
        self, step: TimeStep, x: Tensor, states: tuple[Tensor, ...], parameters: StepParameters,
        batch_sizes: Tensor | None, *, backwards: bool,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        if step in self._dynamic:
            return _dynamic_lstm(self._dynamic[step], x, states, parameters, backwards=backwards)
        is_float = step not in self._quantized and self._kind in ONE_OPERATOR
        if is_float and batch_sizes is None and parameters.w_hr is None:
            return self._one_operator(x, states, parameters, backwards=backwards)
        return scan_over_time(step, x, states, parameters, batch_sizes, backwards=backwards)

    def _one_operator(
        self, x: Tensor, states: tuple[Tensor, ...], parameters: StepParameters, *, backwards: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        first = [state.unsqueeze(0) for state in states]
        start = first if self._kind == "lstm" else first[0]
        run: Any = SEQUENCES[self._kind]
        sequence = x.flip(0) if backwards else x
        has_biases = parameters.b_ih is not None
        output, *last = run(sequence, start, parameters.flat, has_biases, 1, 0.0, False, False, False)
        return output.flip(0) if backwards else output, tuple(state.squeeze(0) for state in last)


def _dynamic_lstm(
    step: DynamicStep, x: Tensor, states: tuple[Tensor, ...], parameters: StepParameters, *, backwards: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    hidden, cell = states
    output, *last = torch.ops.qtk.dynamic_lstm(
        SITE_MARKER(x, step.x), SITE_MARKER(hidden, step.hidden), cell, parameters.w_ih, parameters.w_hh,
        parameters.b_ih, parameters.b_hh, backwards,
    )
    return output, tuple(last)


def _dynamic_step(
    parts: Mapping[str, CapturedGraph | None], weights: Sequence[object], sites: Mapping[fx.Node, SimulatedSite]
) -> DynamicStep | None:
    """The sites of a step of case 1, ``None`` for others: its two graphs, and the values that it reads as weights."""
    stored = [sites.get(weight) for weight in weights if isinstance(weight, fx.Node)]
    if len(stored) != len(PARTS) or not all(site is not None and _fits_kernel(site) for site in stored):
        return None
    names = {}
    for name, place in PARTS.items():
        part = parts[name]
        if part is None:
            return None
        inputs = part.graph.find_nodes(op="placeholder")
        quantized = [site for node in part.graph.nodes if (site := sites.get(node)) is not None]
        if len(quantized) != 1 or quantized[0].spec != DYNAMIC_INPUT or quantized[0].node.args[0] is not inputs[place]:
            return None
        names[name] = quantized[0].name
    return DynamicStep(names["projection"], names["cell"])


def _fits_kernel(site: SimulatedSite) -> bool:
    """Says whether a site is a weight of int8 codes, with one scale or one for each row."""
    spec = site.spec
    return (
        site.constant is not None and site.constant.dtype == torch.float32 and spec.dtype.name == "int8"
        and spec.symmetric and spec.granularity in (PerTensor(), PerChannel(0))
    )
