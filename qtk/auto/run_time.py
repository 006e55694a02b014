"""Estimates how long a simulation runs in the runtime of its target, over the float model: op by op, by its kernels."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, fx

from qtk.auto.matrix_products import GraphCalls, MatrixProduct, operand_ports
from qtk.config.runtime import KernelRow, Kernels, Rates
from qtk.core.plan import SitePlan, leaders
from qtk.graph.captured_graph import CapturedGraph
from qtk.graph.flow import Flow
from qtk.graph.graphs import graphs, nested_graphs
from qtk.graph.insert import quantizer_called
from qtk.graph.simulation import Simulation
from qtk.graph.sites import is_float
from qtk.nn.attention import Attention
from qtk.operators.lookup import row_of
from qtk.operators.op_row import OpRow, Role, Scaling
from qtk.operators.targets import called_module

PRODUCTS = ("conv", "conv_transpose", "linear", "matmul")

MOVED = 20.0
"""Multiplications of floats in the time that a float is read and another is written: a ridge point of 5 operations for
each byte of memory, as of many processors (Williams, Waterman and Patterson, Roofline, CACM 52(4), 2009)."""

BY_BITS = Kernels(
    source="estimate",
    rows=(KernelRow(op=PRODUCTS, float=1.0, integer=0.25, dynamic=0.25),),
    others=Rates(float=MOVED, integer=MOVED / 4),
    quantize=MOVED * 5 / 8, dequantize=MOVED * 5 / 8, most_bits=16,
)
"""For runtimes of which no kernel was measured: time goes by bits, multiplied in products and moved in other ops."""


class RunTime:
    """Estimates times of simulations of one model, all against its float time.

    Args:
        kernels: of the runtime; ``None``: ``BY_BITS``.
    """

    def __init__(self, kernels: Kernels | None) -> None:
        self._kernels = kernels or BY_BITS

    def ratio(self, simulation: Simulation, run: Callable[[], object]) -> float | None:
        """The time of a simulation over the time of the float model; ``None`` of a model without ops of floats.

        A product takes time by its multiplications, another op by the elements of its result. An op whose operands are
        quantized computes in integers where the runtime has such a kernel and the widths fit; elsewhere each operand is
        dequantized first, and a result that is quantized is quantized behind it. Rectifiers and clamps behind a product
        or a sum cost nothing; nor does data movement. A recurrent layer or attention in float counts by its products.

        Args:
            simulation: calibrated.
            run: calls its model once.
        """
        calls = GraphCalls(simulation.model)
        with calls.listening(), torch.no_grad():
            run()
            found = {graph: _Ops(graph, self._kernels, calls, simulation)
                     for graph in graphs(simulation.model).values() if graph in calls.counts}
        whole = {nested for ops in found.values() for nested in ops.composites}
        total = sum(calls.counts[graph] * ops.time for graph, ops in found.items())
        in_float = sum(calls.counts[graph] * ops.float_time for graph, ops in found.items() if graph not in whole)
        return total / in_float if in_float else None


class _Ops:
    """The ops of one graph.

    Attributes:
        time: of one call, as simulated.
        float_time: of one call in float.
        composites: the graphs of the ops that ``float_time`` has as wholes.
    """

    def __init__(self, graph: CapturedGraph, kernels: Kernels, calls: GraphCalls, simulation: Simulation) -> None:
        self._flow, self._kernels, self._calls, self._sizes = Flow(graph.graph), kernels, calls, calls.sizes[graph]
        self.composites: set[CapturedGraph] = set()
        plan = simulation.plan
        self._plans = {simulation.quantizers[site]: plan[site] for site in leaders(plan)}
        self._in_integers: set[fx.Node] = set()
        self._dequantized: set[fx.Node] = set()
        self.time = self.float_time = 0.0
        for node in graph.graph.nodes:
            if (quantizer := quantizer_called(node)) is not None:
                self._quantize(node, self._plans.get(quantizer))
            elif node.op == "output":
                self._dequantize([each for each in node.all_input_nodes if is_float(each)])
            elif nested := nested_graphs(node):
                self._add_composite(node, set(nested.values()))
            elif (row := row_of(node)) is not None and row.role in (Role.COMPUTE, Role.MERGE) and (
                not self._flow.is_static(node) and is_float(node)
            ):
                self._add(node, row)

    def _add(self, node: fx.Node, row: OpRow) -> None:
        kernel = self._kernels.row(row.names)
        operands = [port.value for port in self._flow.data_ports(node)]
        units = self._elements(node)
        if row.product is not None:
            operands = [port.value for port in operand_ports(node)]
            units = MatrixProduct(node, (None, None), 1, self._sizes).multiplications
        elif self._is_fused(node, row):
            if self._maker(node.all_input_nodes[0]) in self._in_integers:
                self._in_integers.add(node)
            return
        self.float_time += units * kernel.float
        plans = [self._plan(each) for each in operands]
        specs = [plan.spec for plan in plans if plan is not None]
        if specs and len(specs) == len(plans) and max(spec.dtype.bits for spec in specs) <= self._kernels.most_bits:
            is_dynamic = any(spec.dynamic for spec in specs)
            rate = kernel.dynamic if is_dynamic else kernel.integer
            if rate is not None and (row.product is not None or self._is_quantized(node)):
                self.time += units * rate * max(8, *(spec.dtype.bits for spec in specs)) / 8
                if not is_dynamic:
                    self._in_integers.add(node)
                return
        self.time += units * kernel.float
        self._dequantize(operands)

    def _add_composite(self, node: fx.Node, nested: set[CapturedGraph]) -> None:
        """Adds the products of a recurrent layer or of attention in float, unless its parts run and are counted."""
        values = [each for each in node.all_input_nodes if isinstance(each.meta.get("val"), Tensor)]
        weights = [each for each in values if self._flow.is_parameter(each) and each.meta["val"].ndim > 1]
        is_attention = isinstance(called_module(node), Attention)
        if is_attention:  # queries, keys and values [..., tokens, features]
            queries, keys_of = (each for each in node.args[:2] if isinstance(each, fx.Node))  # maybe one value
            keys = MatrixProduct.lengths_of(keys_of.meta["val"], self._sizes)[-2]
            time = 2 * keys * self._elements(queries) * self._kernels.row(("matmul", "matmul")).float
        elif weights:
            rows = self._elements(node) / self._lengths(node)[-1]
            time = rows * sum(map(self._elements, weights)) * self._kernels.row(("linear", "linear")).float
        else:
            return
        self.composites |= nested
        self.float_time += time
        if not any(graph in self._calls.counts for graph in nested):
            self.time += time
            self._dequantize(values)

    def _quantize(self, node: fx.Node, plan: SitePlan | None) -> None:
        """Adds the time to quantize a value, unless the op that makes it does, it is static, or its readers do."""
        root = self._flow.root(node.all_input_nodes[0])
        if plan is not None and not plan.static and not plan.spec.dynamic and (
            root not in self._in_integers and quantizer_called(root) is None
        ):
            self.time += self._elements(node) * self._kernels.quantize

    def _dequantize(self, operands: list[fx.Node]) -> None:
        """Adds the time to dequantize values, each once; runtimes keep weights of float ops in float."""
        for each in operands:
            plan = self._plan(each)
            if plan is not None and not plan.static and not plan.spec.dynamic:
                root = self._flow.root(each)
                if root not in self._dequantized:
                    self._dequantized.add(root)
                    self.time += self._elements(root) * self._kernels.dequantize

    def _is_fused(self, node: fx.Node, row: OpRow) -> bool:
        """Says whether the op is a rectifier or clamp that runtimes compute with the product or sum in front of it."""
        if not row.activation or not (row.rectifier or row.scaling is Scaling.CLAMPED):
            return False
        before = row_of(self._maker(node.all_input_nodes[0]))
        return before is not None and (before.product is not None or before.kind == "add")

    def _is_quantized(self, node: fx.Node) -> bool:
        """Says whether the result is quantized, behind a rectifier or clamp maybe."""
        def is_quantized(user: fx.Node) -> bool:
            row = row_of(user)
            return quantizer_called(user) is not None or (
                row is not None and self._is_fused(user, row) and self._is_quantized(user))

        return any(map(is_quantized, self._flow.next_ops(node)))

    def _maker(self, value: fx.Node) -> fx.Node:
        """The node that computed the elements of a value, before they were quantized."""
        root = self._flow.root(value)
        return root if quantizer_called(root) is None else self._maker(root.all_input_nodes[0])

    def _plan(self, value: fx.Node) -> SitePlan | None:
        """Says how a value is quantized; ``None`` of floats."""
        quantizer = self._calls.made_by(value)
        return None if quantizer is None else self._plans.get(quantizer)

    def _elements(self, value: fx.Node) -> float:
        return float(math.prod(self._lengths(value)))

    def _lengths(self, value: fx.Node) -> list[int]:
        """The shape of a value, or of the first of several; [0] of anything else."""
        found = value.meta.get("val")
        while isinstance(found, (list, tuple)) and found:
            found = found[0]
        return MatrixProduct.lengths_of(found, self._sizes) if isinstance(found, Tensor) else [0]
