"""Which sites of raw data have steps that are large for what constants make of them: columns in several units.

A model that standardizes its input, ``(x - mean) / std`` per column, brings columns of several units into one range.
One range for all columns of x leaves some of them few codes: a step s of x is s / std of the result. The same holds
where a large offset is taken off, of a temperature in kelvin or of a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, fx

from qtk.calibration.width_check import LargeStep
from qtk.core.site import Site
from qtk.graph.evaluate import evaluate, evaluate_node
from qtk.graph.flow import Flow
from qtk.graph.graphs import graphs
from qtk.graph.insert import quantizer_called
from qtk.graph.simulation import Simulation
from qtk.graph.sites import SITE, is_float, label
from qtk.nn.device import device_of
from qtk.operators.op_row import Scaling
from qtk.operators.op_table import IDENTITY
from qtk.quantizers.quantizer import Quantizer

LARGEST_STEP = 16.0
"""In steps of the result, which has 8 bits with 16 values in its range then, and 19 dB."""

SCALINGS = frozenset({Scaling.ADDED, Scaling.MULTIPLIED, Scaling.DIVIDED, Scaling.SCALE_SHIFT})
"""Sums, products, quotients, and batch norms that are folded into no layer; negations are followed too."""


def coarse_inputs(simulation: Simulation) -> dict[Site, LargeStep]:
    """The calibrated sites of inputs, and of sums and products of these with constants, that nothing else reads."""
    shared = {decided.leader for decided in simulation.plan.values()}
    found: dict[str, LargeStep] = {}
    for graph in graphs(simulation.model).values():
        search = _Search(simulation, Flow(graph.graph))
        for node in graph.graph.find_nodes(op="placeholder"):
            found |= search.along(node)
    return {site: found[site.name] for site, decided in simulation.plan.items()
            if site.name in found and decided.leader is None and site not in shared}


class _Search:
    """Follows inputs through ops whose other operand is a constant."""

    def __init__(self, simulation: Simulation, flow: Flow) -> None:
        self._flow, self._device = flow, device_of(simulation.model)
        self._sites = {site.name: site for site in simulation.plan}
        self._values: dict[fx.Node, object] = {}

    def along(self, value: fx.Node) -> dict[str, LargeStep]:
        """The coarse sites among ``value`` and what constants make of it, by their names."""
        found: dict[str, LargeStep] = {}
        ops = [op for op in _readers(value, self._flow) if self._factors(op, value) is not None]
        for op in ops:
            found |= self.along(op)
        quantizer = _quantizer(value) if ops else None
        step = _step(quantizer)
        if quantizer is None or step is None:
            return found
        steps = step * self._result_steps(value, torch.ones(()))
        if steps > LARGEST_STEP:
            reason = f"one step of its range is {steps:.0f} steps of what constants make of it"
            constants = tuple(dict.fromkeys(site for op in (value, *ops) for site in self._constants(op)))
            found[str(label(quantizer, SITE))] = LargeStep(reason, steps / LARGEST_STEP, constants)
        return found

    def _result_steps(self, value: fx.Node, factors: Tensor) -> float:
        """Returns how many steps of a result an error of 1 in ``value`` is, the largest number on the way.

        The least of several readers counts; 0 if one of them is no sum or product with a constant. ``factors`` is what
        the ops in front have multiplied the error with.
        """
        least = math.inf
        for op in _readers(value, self._flow):
            own = self._factors(op, value)
            if own is None:
                return 0.0
            passed, step = factors.to(own) * own, _step(_quantizer(op))
            here = 0.0 if step is None else float(passed.max()) / step
            least = min(least, max(here, self._result_steps(op, passed)))
        return least if math.isfinite(least) else 0.0

    def _factors(self, op: fx.Node, value: fx.Node) -> Tensor | None:
        """Returns what an op multiplies the elements of ``value`` with, as magnitudes; ``None`` if it is no such op."""
        row = self._flow.row(op)
        if row is None or (row.scaling not in SCALINGS and row.kind != "neg"):
            return None
        data = [read for read in op.all_input_nodes if not self._flow.is_static(read)]
        if len(data) != 1 or not is_float(data[0]) or _source(data[0], self._flow) is not value:
            return None
        if row.divisors and op.args[0] is not data[0]:
            return None
        shape = [size if isinstance(size, int) else 1 for size in data[0].meta["val"].shape]
        zeros = torch.zeros(shape, dtype=torch.float64, device=self._device)
        constants = {read: self._constant(read) for read in op.all_input_nodes if read is not data[0]}
        with torch.no_grad():
            at_0, at_1 = (evaluate_node(op, {**constants, data[0]: x}.__getitem__) for x in (zeros, zeros + 1))
        factors: Tensor = (at_1 - at_0).abs()
        return factors if factors.shape == zeros.shape else None

    def _constant(self, node: fx.Node) -> object:
        value = evaluate(node, self._values, bypass_quantizers=True)
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    def _constants(self, op: fx.Node) -> Iterator[Site]:
        """Yields the sites of the constants that an op reads."""
        for read in op.all_input_nodes:
            if self._flow.is_static(read) and quantizer_called(read) is not None:
                yield self._sites[str(label(read, SITE))]


def _readers(value: fx.Node, flow: Flow) -> Iterator[fx.Node]:
    """Yields the ops that compute real numbers of a value, behind its quantizer and what returns it as it is."""
    for user in value.users:
        if quantizer_called(user) is not None or flow.row(user) is IDENTITY:
            yield from _readers(user, flow)
        elif is_float(user) or user.op == "output":
            yield user


def _source(node: fx.Node, flow: Flow) -> fx.Node:
    """The value that a quantizer, or an op that returns its input as it is, reads."""
    while quantizer_called(node) is not None or flow.row(node) is IDENTITY:
        (node, *_) = node.all_input_nodes
    return node


def _quantizer(value: fx.Node) -> fx.Node | None:
    return next((user for user in value.users if quantizer_called(user) is not None), None)


def _step(node: fx.Node | None) -> float | None:
    """The step of a quantizer with one range; ``None`` if it has none, or if that is frozen."""
    quantizer: Quantizer | None = None if node is None else quantizer_called(node)
    encoding = None if quantizer is None or quantizer.frozen else quantizer.encoding
    return None if encoding is None or encoding.scale.numel() > 1 else float(encoding.scale)
