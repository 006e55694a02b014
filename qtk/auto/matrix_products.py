"""The matrix products of a simulation: how many multiplications each makes, and which sites it multiplies."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, fx, nn

from qtk.calls.size_expressions import size_at
from qtk.core.plan import leaders
from qtk.core.site import Site
from qtk.graph.captured_graph import CapturedGraph
from qtk.graph.flow import Flow, maker
from qtk.graph.graphs import graphs, nested_graphs
from qtk.graph.insert import quantizer_called
from qtk.graph.simulation import Simulation
from qtk.graph.sites import Port, ports
from qtk.operators.lookup import row_of
from qtk.operators.op_row import Product
from qtk.operators.targets import called_module
from qtk.quantizers.quantizer import Quantizer
from qtk.torch_private import length_hint, pytree, size_text


@dataclass(frozen=True, slots=True, eq=False)
class MatrixProduct:
    """A product of two matrices, or a convolution.

    Args:
        node: the op.
        operands: the sites whose codes it multiplies, data first; ``None`` for one that is not quantized.
        calls: how often it is computed when the model is called once.
        sizes: name of a free size of its graph → its length in that call.
    """

    node: fx.Node
    operands: tuple[Site | None, Site | None]
    calls: int
    sizes: Mapping[str, int]

    @property
    def multiplications(self) -> int:
        """Says how many it makes when the model is called once."""
        row = row_of(self.node)
        assert row is not None
        data, other = operand_ports(self.node)
        shape, of_data, of_other = (self.lengths(value) for value in (self.node, data.value, other.value))
        if row.product is Product.CONV:
            return self.calls * math.prod(shape) * math.prod(of_other[1:])
        if row.product is Product.CONV_TRANSPOSE:
            return self.calls * math.prod(of_data) * math.prod(of_other[1:])
        return self.calls * math.prod(shape) * of_data[-1]

    def lengths(self, value: fx.Node) -> list[int]:
        """The shape of the result or of an operand."""
        return self.lengths_of(value.meta["val"], self.sizes)

    @staticmethod
    def lengths_of(value: Tensor, sizes: Mapping[str, int]) -> list[int]:
        """The shape of a value with some lengths of the free sizes; a length of other names is that at capture."""
        known = (length if isinstance(length, int) else size_at(size_text(length), sizes) for length in value.shape)
        return [length_hint(own) if length is None else length for own, length in zip(value.shape, known, strict=True)]


def matrix_products(simulation: Simulation, run: Callable[[], object]) -> list[MatrixProduct]:
    """The products of the ops whose rows in the op table say which product they compute; einsum is left out.

    Args:
        simulation: calibrated.
        run: calls its model once.
    """
    sites = {simulation.quantizers[site]: site for site in leaders(simulation.plan)}
    calls, found = GraphCalls(simulation.model), []
    with calls.listening(), torch.no_grad():
        run()
    for graph in graphs(simulation.model).values():
        for node in graph.graph.nodes if graph in calls.counts else ():
            row = row_of(node) if node.op == "call_function" else None
            if row is not None and row.product is not None:
                data, other = (calls.made_by(port.value) for port in operand_ports(node))
                operands = (sites.get(data) if data else None, sites.get(other) if other else None)
                found.append(MatrixProduct(node, operands, calls.counts[graph], calls.sizes[graph]))
    return found


def operand_ports(node: fx.Node) -> tuple[Port, Port]:
    """The ports of the two operands of a matrix product, data first."""
    row, of_arg = row_of(node), {port.arg: port for port in ports(node)}
    assert row is not None
    data = 0 if row.data_arg is None else row.data_arg
    return of_arg[data], next(of_arg[arg] for arg in row.weights if arg != data)


class GraphCalls:
    """How often each graph runs, and which quantizers make what ops read, inside and outside of composites.

    ``counts``: graph → its calls. ``sizes``: graph → name of a free size → its length in the last of them.

    What a nested graph is given is told by its memory, which views share; so all values are kept while the model runs.

    Args:
        model: a prepared model with quantizers.
    """

    def __init__(self, model: nn.Module) -> None:
        self.counts: dict[CapturedGraph, int] = {}
        self.sizes: dict[CapturedGraph, dict[str, int]] = {}
        self._graphs = list(graphs(model).values())
        self._flows = {graph.graph: Flow(graph.graph) for graph in self._graphs}
        self._given: dict[fx.Node, Quantizer | None] = {}
        self._makers: dict[int, Quantizer | None] = {}
        self._kept: list[Tensor] = []

    def made_by(self, node: fx.Node) -> Quantizer | None:
        """The quantizer that rounded the elements of a value; ``None`` if none did, or it is not known which."""
        root = self._flows[node.graph].root(node)
        if root.op == "placeholder":
            return self._given.get(root)
        if (quantizer := quantizer_called(root)) is not None:
            return quantizer
        nested = list(nested_graphs(maker(root)).values())
        if not nested or (maker(root) is not root and root.args[1] != 0):
            return None
        result = nested[-1].graph.output_node().all_input_nodes
        return self.made_by(result[0]) if result else None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Learns from the calls in the body."""
        with ExitStack() as hooks:
            for graph in self._graphs:
                hooks.callback(graph.register_forward_pre_hook(self._called, with_kwargs=True).remove)
                for node in graph.graph.find_nodes(op="call_module"):
                    module = called_module(node)
                    if isinstance(module, Quantizer):
                        hooks.callback(module.register_forward_hook(self._made).remove)
                    elif module is not None:
                        hooks.callback(module.register_forward_pre_hook(partial(self._entered, node)).remove)
            yield
        self._makers.clear()
        self._kept.clear()

    def _made(self, quantizer: nn.Module, _: object, value: object) -> None:
        self._remember(value, quantizer)

    def _entered(self, node: fx.Node, _: nn.Module, args: tuple[object, ...]) -> None:
        for read, value in zip(pytree.tree_leaves(node.args), pytree.tree_leaves(args), strict=False):
            if isinstance(read, fx.Node) and isinstance(read.meta.get("val"), Tensor):
                self._remember(value, self.made_by(read))

    def _remember(self, value: object, maker: nn.Module | None) -> None:
        if isinstance(value, Tensor) and isinstance(maker, Quantizer):
            self._makers[value.untyped_storage().data_ptr()] = maker
            self._kept.append(value)

    def _called(self, graph: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        assert isinstance(graph, CapturedGraph)
        inputs = zip(graph.graph.find_nodes(op="placeholder"), pytree.tree_leaves((args, kwargs)), strict=False)
        tensors = {node: value for node, value in inputs
                   if isinstance(value, Tensor) and isinstance(node.meta.get("val"), Tensor)}
        for node, value in tensors.items():
            self._given[node] = self._makers.get(value.untyped_storage().data_ptr())
        self.counts[graph] = self.counts.get(graph, 0) + 1
        self.sizes[graph] = {name: length for node, value in tensors.items()
                             for name, length in _free_lengths(node.meta["val"].shape, value).items()}


def _free_lengths(shape: Sequence[int | torch.SymInt], value: Tensor) -> dict[str, int]:
    """The lengths of the free sizes of a shape in a value; of a single one also where its axes are in another order, as
    sequences come to a recurrent layer, once by sample and once by step.
    """
    fixed = math.prod(size for size in shape if isinstance(size, int))
    free = [size_text(size) for size in shape if not isinstance(size, int)]
    if len(free) == 1:
        return {free[0]: value.numel() // max(1, fixed)}
    return {size_text(size): length for size, length in zip(shape, value.shape, strict=False)
            if not isinstance(size, int)}
